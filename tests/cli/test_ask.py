"""``looseleaf ask``: documents from files, folders and standard input; errors that help."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from looseleaf import LLM, Document, SamplingParams
from tests.cli.conftest import Run

HANDBOOK = "Mira Tolland signs the travel requests."
MENU = "On Friday there is soup."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    (tmp_path / "docs" / "handbook.txt").write_text(HANDBOOK)
    (tmp_path / "docs" / "deep" / "menu.md").write_text(MENU)
    (tmp_path / "docs" / "picture.png").write_bytes(b"\x89PNG")
    return tmp_path / "docs"


def tiny(model: Path) -> tuple[object, ...]:
    return ("--model", model, "--num-pages", 64, "--device", "cpu", "--max-tokens", 8)


def expected_answer(model: Path, *documents: Document) -> str:
    llm = LLM(model, num_pages=64, device="cpu")
    messages = [{"role": "user", "content": [*documents, "Who signs?"]}]
    params = SamplingParams(max_tokens=8, temperature=0.0)
    return llm.chat(messages, params)[0].text


def test_the_answer_is_that_of_the_library(run: Run, model: Path, folder: Path) -> None:
    result = run("ask", "-d", folder / "handbook.txt", "Who signs?", *tiny(model))
    assert result.code == 0
    assert result.out == expected_answer(model, Document(HANDBOOK)) + "\n"


def test_a_folder_stands_for_its_text_files_in_order(run: Run, model: Path, folder: Path) -> None:
    result = run("ask", "-d", folder, "Who signs?", "--show-reuse", *tiny(model))
    assert result.code == 0
    assert result.out == expected_answer(model, Document(MENU), Document(HANDBOOK)) + "\n"
    report = [line for line in result.err.splitlines() if " tokens" in line]
    assert [line.split(":")[0] for line in report[-3:]] == ["menu.md", "handbook.txt", "documents"]
    assert report[-2].endswith("computed")


def test_a_document_may_come_from_standard_input(run: Run, model: Path) -> None:
    stdin = (HANDBOOK + " é").encode()
    result = run("ask", "-d", "-", "Who signs?", "--show-reuse", *tiny(model), stdin=stdin)
    assert result.out == expected_answer(model, Document(HANDBOOK + " é")) + "\n"
    assert "standard input: " in result.err


def test_a_question_needs_no_document(run: Run, model: Path) -> None:
    result = run("ask", "Who signs?", "--system", "Be brief.", *tiny(model))
    assert (result.code, bool(result.out.strip("\n"))) == (0, True)
    assert "no document was given" in result.err


def test_without_show_reuse_nothing_but_the_answer_is_said(
    run: Run, model: Path, folder: Path
) -> None:
    told = run("ask", "-d", folder, "Who signs?", *tiny(model)).err
    assert "tokens reused" not in told
    assert "no document" not in told


def test_the_report_names_every_policy_and_every_document(
    run: Run, model: Path, folder: Path
) -> None:
    asked = ("ask", "-d", folder, "Who signs?", "--show-reuse", *tiny(model))
    revised = run(*asked, "--select", "quest", "--budget", 0.5, "--revise", 2).err
    assert "\nrevise: window 2" in revised
    # the tiny model has three layers
    assert "layers 0, 1 read everything" in revised
    assert "select: quest, ratio 0.5" in revised
    text = run(*asked, "--context", "prompt").err
    assert "menu.md: text of this prompt, by --context prompt" in text
    assert "handbook.txt: text of this prompt" in text
    assert " threads: " in text
    assert "revise" not in text


def test_a_checkpoint_without_a_chat_template_completes_the_text(
    run: Run, model: Path, folder: Path, tmp_path: Path
) -> None:
    import json

    base = shutil.copytree(model, tmp_path / "base")
    settings = json.loads((base / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    result = run("ask", "-d", folder, "Who signs?", *tiny(base))
    assert result.code == 0
    assert result.out.endswith("\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no file"),
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\xff\xfe\x00broken", "not UTF-8"),
    ],
)
def test_a_file_that_is_no_text_is_refused_in_one_sentence(
    run: Run, model: Path, tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "file.txt"
    if content is not None:
        path.write_bytes(content)
        # the same bytes from a pipe
        piped = run("ask", "-d", "-", "Who?", *tiny(model), stdin=content).sentence()
        assert message in piped
    sentence = run("ask", "-d", path, "Who?", *tiny(model)).sentence()
    assert message in sentence
    assert "file.txt" in sentence


def test_a_file_of_a_folder_is_named_with_its_folder(run: Run, model: Path, folder: Path) -> None:
    (folder / "deep" / "broken.txt").write_bytes(b"\xff\xfe\x00broken")
    sentence = run("ask", "-d", folder, "Who?", *tiny(model)).sentence()
    assert f"{folder / 'deep' / 'broken.txt'} is not UTF-8" in sentence


def test_an_empty_file_of_a_folder_is_left_out_with_a_word(
    run: Run, model: Path, folder: Path
) -> None:
    empty = folder / "deep" / "nothing.txt"
    empty.write_text(" \n")
    result = run("ask", "-d", folder, "Who signs?", *tiny(model))
    assert result.code == 0
    assert result.out == expected_answer(model, Document(MENU), Document(HANDBOOK)) + "\n"
    assert f"{empty} is empty and skipped" in result.err
    # of a folder that holds no other, nothing is left
    (folder / "deep" / "menu.md").unlink()
    sentence = run("ask", "-d", folder / "deep", "Who signs?", *tiny(model)).sentence()
    assert f"{folder / 'deep'} is empty" in sentence


def test_a_budget_of_one_point_naught_is_a_share_and_of_one_a_token(
    run: Run, model: Path, folder: Path
) -> None:
    asked = ("ask", "-d", folder, "Who signs?", "--show-reuse", *tiny(model), "--select", "window")
    assert "ratio 1" in run(*asked, "--budget", "1.0").err
    assert "tokens 1" in run(*asked, "--budget", "1").err
    text = " ".join(run("ask", "--help").out.split())
    assert "a whole number of tokens" in text and "by default the first 2" in text


def test_a_folder_without_text_files_is_refused(run: Run, model: Path, tmp_path: Path) -> None:
    assert "has no" in run("ask", "-d", tmp_path, "Who?", *tiny(model)).sentence()


def test_an_empty_question_is_refused(run: Run, model: Path) -> None:
    assert "question is empty" in run("ask", " ", *tiny(model)).sentence()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--page-size", 17), "16, 32 or 64"),
        (("--num-pages", -1), "positive"),
        (("--device", "abacus"), "device"),
        (("--temperature", -1), "temperature"),
        (("--num-pages", 1), "enlarge the cache"),
        (("--max-model-len", 10), "--max-model-len"),
        (("--select", "quest", "--budget", "nan"), "--budget is a number of tokens"),
        (("--select", "quest", "--budget", "inf"), "--budget is a number of tokens"),
        (("--select", "quest", "--budget", -5), "--budget is a number of tokens"),
        (("--select", "quest", "--budget", 1.5), "neither a whole number nor a share up to 1.0"),
        (("--ratio", 0.1), "first, random, deviation, question, links"),
        (("--canary-share", 0.1), "check the answers of --fuse"),
        (("--canary-bound", 0.9), "check the answers of --fuse"),
        (("--disk-gib", 1), "the size of --disk-path"),
        (("--tier-packing", "on"), "give --disk-path, --host-gib or --remote-url too"),
    ],
    ids=str,
)
def test_an_option_out_of_range_is_refused_in_one_sentence(
    run: Run, model: Path, folder: Path, options: tuple[object, ...], message: str
) -> None:
    result = run("ask", "-d", folder, "Who signs?", *tiny(model), *options)
    assert message in result.sentence()


@pytest.mark.parametrize(
    "options", [("--no-such-option",), ("--dtype", "int8"), ("--page-size", "many")], ids=str
)
def test_an_unknown_option_or_value_is_refused(run: Run, options: tuple[str, ...]) -> None:
    result = run("ask", "Who?", *options)
    assert (result.code, result.out) == (2, "")
    assert options[0] in result.err


def break_nothing(folder: Path) -> None:
    shutil.rmtree(folder)


def break_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def break_family(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"llama"', '"alpaca"'))


def break_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    "damage", [break_nothing, break_weights, break_config, break_family, break_tokenizer]
)
def test_a_missing_or_broken_checkpoint_is_refused_in_one_sentence(
    run: Run, model: Path, tmp_path: Path, damage: object
) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    assert callable(damage)
    damage(copy)
    result = run("ask", "Who?", *tiny(copy))
    assert len(result.sentence()) < 500


def test_the_module_runs_as_a_program_and_exits_with_2_on_a_refusal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "looseleaf", "ask", "-d", str(tmp_path / "none"), "Who?"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("looseleaf: no file")
    assert len(done.stderr.splitlines()) == 1

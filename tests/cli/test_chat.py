"""``looseleaf chat``, scripted: documents are computed once for all questions."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from looseleaf import LLM
from looseleaf.engine.reports.outputs import RequestOutput
from tests.cli.conftest import Result, Run
from tests.engine.harness import assert_idle


@pytest.fixture
def handbook(tmp_path: Path) -> Path:
    path = tmp_path / "handbook.txt"
    path.write_text("Mira Tolland signs the travel requests.")
    return path


def chat(run: Run, model: Path, *lines: str, options: tuple[object, ...] = ()) -> Result:
    script = "".join(line + "\n" for line in lines).encode()
    tiny = ("--model", model, "--num-pages", 64, "--device", "cpu", "--max-tokens", 4)
    return run("chat", *tiny, *options, stdin=script)


def said(result: Result) -> list[str]:
    """The lines on standard output without the prompts before them."""
    return [line.removeprefix("> ") for line in result.out.splitlines()]


def test_a_document_is_computed_for_the_first_question_and_reused_ever_after(
    run: Run, model: Path, handbook: Path
) -> None:
    result = chat(
        run, model, "/reuse", "Who signs?", "/reuse", "Why?", "/reuse", "/new", "Who?", "/reuse",
        "/quit", "never read", options=("-d", handbook),
    )  # fmt: skip
    assert result.code == 0
    assert "no answer yet" in result.out
    reports = [line for line in said(result) if line.startswith("handbook.txt: ")]
    assert [report.rsplit(" ", 1)[1] for report in reports] == ["computed", "cached", "cached"]


def test_documents_can_be_added_and_listed(run: Run, model: Path, handbook: Path) -> None:
    result = chat(run, model, "/docs", f"/add {handbook}", "/docs", "Who?", "/reuse")
    assert result.code == 0
    lines = said(result)
    assert lines.index("none") < lines.index("added handbook.txt")
    assert lines.index("added handbook.txt") < lines.index("handbook.txt: 39 characters")
    assert any(line.startswith("handbook.txt: ") and line.endswith("computed") for line in lines)


def test_a_mistake_is_told_and_the_conversation_goes_on(
    run: Run, model: Path, handbook: Path
) -> None:
    result = chat(
        run, model, "/add nowhere.txt", "/what", "word " * 200, f"/add {handbook}", "/docs"
    )
    assert result.code == 0
    errors = [line for line in result.err.splitlines() if line.startswith("looseleaf: ")]
    assert "no file nowhere.txt" in errors[0]
    assert "--max-model-len" in errors[1]
    assert result.out.count("/quit") >= 2
    assert "handbook.txt: 39 characters" in result.out


def test_the_end_of_the_input_ends_the_conversation(run: Run, model: Path) -> None:
    assert chat(run, model).code == 0


@pytest.mark.parametrize("word", ["exit", "quit", "/exit", "/quit", "Exit"])
def test_the_words_that_end_a_conversation_are_no_questions(
    run: Run, model: Path, handbook: Path, word: str
) -> None:
    result = chat(run, model, word, "/docs", options=("-d", handbook))
    assert result.code == 0
    assert "handbook.txt" not in result.out


def test_an_interrupt_ends_an_answer_and_not_the_conversation(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, engines = LLM.stream, list[LLM]()

    def interrupted(self: LLM, *arguments: Any, **options: Any) -> Iterator[RequestOutput]:
        engines.append(self)
        for output in stream(self, *arguments, **options):
            if len(engines) == 1 and len(output.token_ids) == 2:
                signal.raise_signal(signal.SIGINT)
            yield output

    monkeypatch.setattr(LLM, "stream", interrupted)
    before = signal.getsignal(signal.SIGINT)
    result = chat(run, model, "Who signs?", "/reuse", "Who signs?", "/reuse")
    assert result.code == 0
    assert result.err.count("stopped: this answer is not part of the conversation") == 1
    # the second question is the first of the conversation
    assert "no answer yet" in result.out
    assert result.out.count("from the prefix cache") == 1
    assert signal.getsignal(signal.SIGINT) is before
    assert len(engines) == 2
    assert_idle(engines[0])


def test_an_answer_without_documents_says_so(run: Run, model: Path, handbook: Path) -> None:
    result = chat(run, model, "Who signs?", f"/add {handbook}", "Who signs?")
    assert result.err.count("no document was given") == 1
    assert "/add FILE" in result.err


def test_a_missing_document_is_refused_before_the_model_is_loaded(run: Run, tmp_path: Path) -> None:
    result = run("chat", "-d", tmp_path / "none.txt", "--model", tmp_path / "no-model")
    assert "no file" in result.sentence()

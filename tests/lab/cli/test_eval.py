"""``looseleaf eval`` as a user calls it."""

import csv
import json
from pathlib import Path

import pytest

from looseleaf_lab.evals.report.reading import reading_tables
from tests.cli.conftest import Run


def test_figures_are_shown_and_appended_with_their_origin(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "evals.csv"
    asked = (
        "eval",
        "world",
        "lookup",
        "--checkpoint",
        "looseleaf-reference-causal",
        "--questions",
        2,
    )
    result = run(*asked, "--documents", 2, "--output", output)
    assert result.code == 0, result.err
    assert "full attention" in result.out and "documents reused" in result.out
    rows = list(csv.DictReader(output.read_text(encoding="utf-8").splitlines()))
    assert [(row["arm"], row["items"], row["against"]) for row in rows] == [
        ("full attention", "2", ""),
        ("documents reused", "2", "full attention"),
    ]
    assert all(row["commit"] and row["setting"] == "2 documents" for row in rows)


def test_figures_that_could_not_be_kept_are_refused_before_anything_is_asked(
    run: Run, tmp_path: Path
) -> None:
    file, other = tmp_path / "file", tmp_path / "speed.csv"
    file.write_text("", encoding="utf-8")
    other.write_text("date,commit,arm\n", encoding="utf-8")
    asked = ("eval", "world", "lookup", "--checkpoint", "causal", "--arm", "full")
    sizes = ("--questions", 1, "--documents", 2)
    beneath = file / "evals.csv"
    assert "rows can't be written to" in run(*asked, *sizes, "--output", beneath).sentence()
    assert "choose another file" in run(*asked, *sizes, "--output", other).sentence()
    documents = ("-d", "examples/documents", "-q", "Who signs travel requests?")
    calibrated = ("calibrate", "--checkpoint", "causal", *documents, "--fuse", "first")
    for output in (beneath, other):
        refused = run(*calibrated, "--ratio", 0.1, "--output", output).sentence()
        assert "rows can't be written to" in refused or "choose another file" in refused
    assert "rows can't be written to" in run("bench", "hits", "--output", beneath).sentence()


def test_answers_in_another_form_are_neither_taken_up_nor_counted_as_the_same(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOSELEAF_COMMIT", "0123456789ab")
    output, answers = tmp_path / "evals.csv", tmp_path / "answers.jsonl"
    asked = (
        "eval",
        "world",
        "lookup",
        "--checkpoint",
        "causal",
        "--questions",
        2,
        "--documents",
        2,
    )
    kept = ("--arm", "full", "--arm", "map-rerank", "--answers", answers, "--output", output)
    for form, lines in ((), 4), (("--form", "chat"), 4), (("--form", "bare"), 8):
        result = run(*asked, *kept, *form)
        assert result.code == 0, result.err
        assert len(answers.read_text(encoding="utf-8").splitlines()) == lines
    rows = list(csv.DictReader(output.read_text(encoding="utf-8").splitlines()))
    names = {(row["arm"], row["against"]) for row in rows if row["metric"] == "exact"}
    plain = {("full attention", ""), ("map-rerank", "full attention")}
    assert names == plain | {
        ("bare: full attention", ""),
        ("bare: map-rerank", "bare: full attention"),
    }


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--model", "a", "--checkpoint", "causal"), "give one of --model and --checkpoint"),
        (("--endpoint", "http://x", "--model", "a"), "give one of --model and --endpoint"),
        (("--endpoint", "http://x"), "--endpoint needs --served-model"),
        (("--arm", "nobody"), "unknown arm 'nobody': use one of full, reuse"),
        (("--questions", "0"), "--questions must be at least 1"),
        (("--documents", "0"), "--documents must be at least 1"),
        (("--batch", "0"), "--batch must be at least 1"),
        (("--first-seed", "-1"), "held-out worlds have seeds 0"),
        (("--budget", "0.1"), "--revise need a --select"),
        (("--select", "window", "--revise", "2"), "--revise needs a --select that scores keys"),
        (("--layer-budgets", "pyramid"), "--revise need a --select"),
        (("--every-layer",), "--every-layer needs a --select"),
        (("--select", "tova", "--layer-budgets", "pyramid"), "a page has all layers"),
        (("--select", "quest", "--stale"), "--stale needs a --revise"),
        (("--fuse", "links", "--check-layer", "1"), "--check-layer is for --fuse deviation"),
        (("--fuse", "first", "--watched-share", "1"), "is for --fuse question and links"),
        (("--processes", "0"), "--processes must be at least 1"),
        (
            ("--endpoint", "http://x", "--served-model", "m", "--processes", "2"),
            "--processes is for models on this machine",
        ),
        (
            ("--endpoint", "http://x", "--served-model", "m", "--select", "quest"),
            "for models in this process",
        ),
        (
            ("--endpoint", "http://x", "--served-model", "m", "--fuse", "links"),
            "for models in this process",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_sentence(
    run: Run, flags: tuple[str, ...], reason: str
) -> None:
    assert reason in run("eval", "world", "lookup", *flags).sentence()


def test_all_compares_with_the_card_and_ends_with_1_if_it_is_not_met(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("looseleaf_lab.cli.evals.evaluate_more._CARD_TASKS", ("lookup",))
    monkeypatch.setattr(
        "looseleaf_lab.cli.evals.evaluate_more._LONG_TASKS", (("deep-chain", {}, 1),)
    )
    asked = ("eval", "all", "--questions", 2, "--output", tmp_path / "evals.csv")
    result = run(*asked)
    assert result.code == 0, result.err
    assert "block lookup, documents reused" in result.out and "card 100.0%" in result.out
    assert result.out.count("chain 4 hops, full attention") == 1
    stated = {("causal", "chain", "4 hops, 6 documents", "full attention"): 0.0}
    monkeypatch.setattr("looseleaf_lab.evals.card.read_card", lambda: stated)
    assert run(*asked).code == 1
    assert run(*asked, "--checkpoint", "block").code == 0


def test_a_selector_is_an_arm_at_every_layer_that_it_is_told_to_look_at(
    run: Run, tmp_path: Path
) -> None:
    output = tmp_path / "evals.csv"
    flags = "eval world lookup --checkpoint causal --questions 1 --fuse question --fuse deviation"
    layers = "--check-layer 1 --check-layer 3 --watched-share 1 --ratio 0.1 --ratio 0.2"
    result = run(*flags.split(), *layers.split(), "--output", output)
    assert result.code == 0, result.err
    with output.open(encoding="utf-8") as file:
        arms = list(dict.fromkeys(row["arm"] for row in csv.DictReader(file)))
    assert arms == [
        "full attention",
        "question, ratio 0.1, watched_share 1",
        "question, ratio 0.2, watched_share 1",
        *(f"deviation, ratio {r}, layers {n}" for n in (1, 3) for r in (0.1, 0.2)),
    ]


def test_what_is_read_and_revised_are_arms_too(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "evals.csv"
    asked = ("eval", "world", "lookup", "--checkpoint", "causal", "--questions", 2)
    policy = ("--select", "quest", "--budget", 0.2, "--budget", 0.4, "--revise", 2)
    several = ("--select", "tova", "--processes", 2, "--batch", 1)
    result = run(*asked, *policy, *several, "--output", output)
    assert result.code == 0, result.err
    rows = list(csv.DictReader(output.read_text(encoding="utf-8").splitlines()))
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    assert arms == [
        "full attention", "quest, ratio 0.2", "quest, ratio 0.2, revise 2", "tova, ratio 0.2",
        "quest, ratio 0.4", "quest, ratio 0.4, revise 2", "tova, ratio 0.4",
    ]  # fmt: skip
    against = {row["arm"]: row["against"] for row in rows if row["against"]}
    assert against[arms[1]] == arms[0] and against[arms[2]] == arms[1]
    read = {row["arm"]: float(row["value"]) for row in rows if row["metric"] == "pages_read"}
    assert read["quest, ratio 0.2"] < read["quest, ratio 0.4"] < 1
    assert {row["arm"] for row in rows if row["metric"] == "exposure_1"} == {arms[2], arms[5]}


def test_ways_to_spread_a_budget_and_to_revise_are_named(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "evals.csv"
    asked = ("eval", "world", "lookup", "--checkpoint", "causal", "--questions", 1)
    ways = ("--layer-budgets", "flat", "--layer-budgets", "pyramid", "--revise", 3, "--stale")
    result = run(*asked, "--select", "quest", "--budget", 0.3, *ways, "--output", output)
    assert result.code == 0, result.err
    rows = list(csv.DictReader(output.read_text(encoding="utf-8").splitlines()))
    policies = ["quest, ratio 0.3", "quest, ratio 0.3, pyramid"]
    revised = ["", ", revise 3", ", revise 3, stale"]
    named = [f"{policy}{window}" for policy in policies for window in revised]
    assert list(dict.fromkeys(row["arm"] for row in rows)) == ["full attention", *named]
    against = {row["arm"]: row["against"] for row in rows if row["against"]}
    assert against[named[5]] == named[3]
    # the same pages in all layers together
    read = {row["arm"]: float(row["value"]) for row in rows if row["metric"] == "pages_read"}
    assert abs(read[policies[0]] - read[policies[1]]) < 0.02
    assert len(list(reading_tables(rows))) == 2


def test_a_budget_of_one_key_is_not_a_share_of_hosted_documents(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "evals.csv"
    asked = ("eval", "world", "lookup", "--checkpoint", "causal", "--questions", 1)
    policy = ("--select", "retrieval", "--budget", "1", "--budget", "1.0")
    assert run(*asked, *policy, "--output", output).code == 0
    rows = list(csv.DictReader(output.read_text(encoding="utf-8").splitlines()))
    read = {row["arm"]: float(row["value"]) for row in rows if row["metric"] == "keys_read"}
    assert list(read) == ["hosted, flat, 1 keys", "hosted, all keys"]
    assert read["hosted, flat, 1 keys"] < 0.2 and read["hosted, all keys"] == 1


def test_ruler_and_files_run_through_the_same_door(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "evals.csv"
    common = ("--checkpoint", "causal", "--arm", "full", "--output", output)
    assert run("eval", "ruler", "vt", "--tokens", 300, "--questions", 1, *common).code == 0
    entry = {"question": "Who lives there?", "answers": ["Mira"], "ctxs": [{"text": "Mira does."}]}
    path = tmp_path / "own.json"
    path.write_text(json.dumps([entry] * 3), encoding="utf-8")
    assert run("eval", "file", path, "--join", 2, *common).code == 0
    rows = list(csv.DictReader(output.read_text(encoding="utf-8").splitlines()))
    assert [(row["task"], row["metric"]) for row in rows] == [
        ("ruler vt", "found"),
        ("file own, joined", "f1"),
        ("file own, joined", "exact"),
        ("file own, joined", "contains"),
    ]
    assert rows[1]["items"] == "2"


def test_rows_of_files_of_one_name_are_told_apart(run: Run, tmp_path: Path) -> None:
    entry = {"question": "Who lives there?", "answers": ["Mira"], "ctxs": [{"text": "Mira does."}]}
    paths = [tmp_path / name for name in ("own.json", "own.jsonl", "a/own.json", "other.json")]
    for number, path in enumerate(paths, 1):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps([entry] * number), encoding="utf-8")
    output = tmp_path / "evals.csv"
    common = ("--checkpoint", "causal", "--arm", "full", "--output", output, "--metric", "f1")
    assert run("eval", "file", *paths, *common).code == 0
    rows = list(csv.DictReader(output.read_text(encoding="utf-8").splitlines()))
    asked = {row["task"]: row["items"] for row in rows}
    assert asked == {
        f"file {tmp_path.name}/own.json": "1",
        "file own.jsonl": "2",
        "file a/own.json": "3",
        "file other": "4",
    }
    twice = run("eval", "file", paths[2], tmp_path / "a" / ".." / "a" / "own.json", *common)
    assert "is given twice" in twice.sentence()


def test_joined_questions_are_no_more_than_asked_for_and_their_label_counts_them(
    run: Run, tmp_path: Path
) -> None:
    entry = {"question": "Who lives there?", "answers": ["Mira"], "ctxs": [{"text": "Mira does."}]}
    path, output = tmp_path / "own.json", tmp_path / "evals.csv"
    path.write_text(json.dumps([entry] * 5), encoding="utf-8")
    common = ("--checkpoint", "causal", "--arm", "full", "--output", output, "--metric", "f1")
    for flags in (("--join", 2, "--questions", 3), ("--join", 9)):
        assert run("eval", "file", path, *flags, *common).code == 0
    rows = list(csv.DictReader(output.read_text(encoding="utf-8").splitlines()))
    assert [(row["setting"], row["items"]) for row in rows] == [
        ("2 questions of 1 documents", "2"),
        ("5 questions of 1 documents", "1"),
    ]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (("all", "--fuse", "links"), "use eval world for other models and policies"),
        (("ruler", "nothing"), "unknown type 'nothing': use one of niah-single-1"),
        (("ruler", "cwe", "--tokens", "20", "--questions", "1"), "use a longer prompt"),
        (("file", "nowhere.json"), "can't be read"),
        (("world", "deep-chain", "--documents", "3", "--questions", "1"), "needs 5 documents"),
    ],
)
def test_other_evaluations_refuse_with_a_sentence(
    run: Run, command: tuple[str, ...], reason: str
) -> None:
    assert reason in run("eval", *command).sentence()

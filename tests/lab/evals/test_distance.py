"""Distances from full prefill: exact arms have none, and a run continues where it stopped."""

import csv
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from looseleaf import LLM, Fuse
from looseleaf.errors import InvalidOption
from looseleaf.llm.load import reference_model
from looseleaf_lab.cli.evals.evaluate import evaluate
from looseleaf_lab.cli.evals.shared import model_label
from looseleaf_lab.evals.distance.arms import PLAIN, choose_arms, of_policy
from looseleaf_lab.evals.distance.ceiling import CEILINGS
from looseleaf_lab.evals.distance.logits import divergence
from looseleaf_lab.evals.distance.measure import DistanceMeter, candidates_of
from looseleaf_lab.evals.distance.run import DistanceRun
from looseleaf_lab.evals.distance.summary import summarize, verdict_of
from looseleaf_lab.evals.files import FileOptions, FileTask, read_task
from looseleaf_lab.evals.run import AnswerFile

DOCUMENTS = [
    {"title": "Orlen Gate", "text": "The seal of Orlen Gate is anchor."},
    {"title": "Mill House", "text": "As in Orlen Gate, the seal of Mill House stays unchanged."},
    {"title": "Taqui", "text": "As in Mill House, the seal of Taqui Bridge stays unchanged."},
]
ENTRIES = [
    {"question": f"What is the seal of {name}?", "answers": [answer], "documents": DOCUMENTS}
    for name, answer in (("Taqui Bridge", "anchor"), ("Mill House", "lantern"))
]
ALL = of_policy(Fuse("all"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "chains.jsonl"
    path.write_text("\n".join(map(json.dumps, ENTRIES)), encoding="utf-8")
    return path


@pytest.fixture
def task(file: Path) -> FileTask:
    return read_task(file, FileOptions(max_tokens=14))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(reference_model("causal"), dtype="float32", device="cpu")


def distance_run(llm: LLM, path: Path | None = None) -> DistanceRun:
    return DistanceRun(llm, "chat", 14, AnswerFile(path), ("code", "model"), num_candidates=2)


def test_arms_that_are_exact_by_law_have_no_distance_and_plain_reuse_has_one(
    llm: LLM, task: FileTask
) -> None:
    arms = choose_arms(("prefix", "none"), [Fuse("all"), Fuse("question", ratio=0.3)], 8)
    measured = distance_run(llm).measure(task, arms, "all")
    for name in ("full", "prefix", "all"):
        for figures in measured[name]:
            assert max(figures["kl"], figures["kl_answer"]) < 1e-5, name
            assert figures["agrees"] == figures["same_choice"] == 1.0
    for number in range(len(ENTRIES)):
        reuse, question = (
            measured[name][number]["kl_answer"] for name in ("reuse", "question, 0.3")
        )
        assert reuse > 0.01 and question < reuse
    assert measured["question, 0.3"][0]["recomputed"] > 0 == measured["reuse"][0]["recomputed"]


def test_tokens_that_full_knowledge_chooses_remove_more_than_random_ones(
    llm: LLM, task: FileTask
) -> None:
    arms = choose_arms((), [Fuse("random", ratio=0.3)], 8, ceilings=(0.3, 1.0))
    measured = distance_run(llm).measure(task, arms, "all")

    def mean(arm: str) -> float:
        return sum(figures["kl_answer"] for figures in measured[arm]) / len(ENTRIES)

    for name in CEILINGS:
        assert mean(f"ceiling {name}, 1") < 1e-5
        assert mean(f"ceiling {name}, 0.3") < mean("random, 0.3")
    recomputed = [measured[name][0]["recomputed"] for name in ("ceiling read, 0.3", "random, 0.3")]
    assert recomputed[0] == recomputed[1] > 0


def test_the_divergence_is_that_of_full_distributions() -> None:
    p, q = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.25, 0.75]])
    expected = 0.5 * torch.tensor(2.0).log() + 0.5 * torch.tensor(2 / 3).log()
    assert divergence(p.log(), q.log()) == pytest.approx(float(expected))
    assert divergence(p.log(), p.log()) == 0.0


def test_a_run_continues_where_it_stopped(
    llm: LLM, task: FileTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, arms = tmp_path / "answers.jsonl", choose_arms(("alone",), (), 8)
    develop = distance_run(llm, path).measure(task, arms, "develop")
    measured = list[str]()
    measure = DistanceMeter.measure

    def watched(self, item, candidates, arm, reference):  # type: ignore[no-untyped-def]
        measured.append(f"{item.key} {arm.name}")
        return measure(self, item, candidates, arm, reference)

    monkeypatch.setattr(DistanceMeter, "measure", watched)
    more = [*arms, ALL]
    both = distance_run(llm, path).measure(task, more, "all")
    # question 0 lacks one arm, and its reference is computed again
    assert [name for name in measured if name.startswith("0")][2:] == ["0 full", "0 all"]
    assert [figures[0] for figures in (both["full"], both["alone"])] == [
        develop["full"][0],
        develop["alone"][0],
    ]
    measured.clear()
    assert distance_run(llm, path).measure(task, more, "decide")["all"] == both["all"][1:]
    assert measured == []


def test_removed_divergence_and_speed_are_ratios_over_the_same_questions() -> None:
    def figures(kl: float, first_token: float) -> dict[str, float]:
        names = ("nll", "kl_answer", "agrees", "f1", "document_tokens", "recomputed")
        return {**dict.fromkeys(names, 1.0), "kl": kl, "first_token": first_token}

    full = [figures(0.0, 3.0), figures(0.0, 5.0)] * 5
    reuse = [figures(0.2, 1.0), figures(0.6, 1.0)] * 5
    arm = [figures(0.1, 2.0), figures(0.1, 2.0)] * 5
    labels = {"model": "m", "file": "f", "part": "all", "device": "cpu"}
    row = summarize(labels, "arm", arm, full, reuse)
    assert (row.kl_removed, row.sooner) == (pytest.approx(0.75), pytest.approx(2.0))
    assert row.kl_removed_low < 0.75 < row.kl_removed_high and row.same_choice == ""
    assert "no loss of likelihood shown; removes 75% of KL; sooner" in verdict_of(row)


def test_candidates_are_the_right_answer_and_other_questions_answers(task: FileTask) -> None:
    assert candidates_of(task.entries, 1) == ["lantern", "anchor"]
    with pytest.raises(InvalidOption, match="unknown arm 'cag'"):
        choose_arms(("cag",), (), 8)
    assert {*PLAIN} < {arm.name for arm in choose_arms((), (), 8)}


def test_the_command_prints_laws_and_verdicts_and_appends_rows(file: Path, tmp_path: Path) -> None:
    output = tmp_path / "rows.csv"
    arguments = [
        *("file", str(file), "--model", str(reference_model("causal")), "--dtype", "float32"),
        *("--measure", "kl,choice", "--part", "decide", "--fuse", "all", "--max-tokens", "8"),
        *("--output", str(output)),
    ]
    result = CliRunner().invoke(evaluate, arguments, catch_exceptions=False)
    assert "law: all equals full prefill" in result.output and "holds" in result.output
    assert "verdict: reuse" in result.output and "same choice" in result.output
    with output.open(encoding="utf-8") as rows:
        read = list(csv.DictReader(rows))
    assert [row["arm"] for row in read] == ["full", "reuse", "all"]
    assert {row["questions"] for row in read} == {"1"}
    alone = [*arguments[:4], "--measure", "choice", "--questions", "1", "--max-tokens", "2"]
    alone += ["--output", str(tmp_path / "alone.csv")]
    result = CliRunner().invoke(evaluate, alone, catch_exceptions=False)
    assert "no choice without answers of other questions" in result.output
    refused = CliRunner().invoke(evaluate, ["file", str(file), "--measure", "taste"])
    assert "unknown measure 'taste'" in str(refused.exception or refused.output)


def test_a_model_is_named_by_its_folder_or_file() -> None:
    names = {
        "/real/SmolLM2-135M-Instruct.Q4_1.gguf": "SmolLM2-135M-Instruct",
        "Qwen2.5-Coder-0.5B-Instruct.gguf": "Qwen2.5-Coder-0.5B-Instruct",
        "gemma-3-270m.Q4_K_M.gguf": "gemma-3-270m",
        "Qwen/Qwen2.5-7B-Instruct": "Qwen2.5-7B-Instruct",
    }
    assert {path: model_label(path) for path in names} == names

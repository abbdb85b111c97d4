"""Selection against dense decoding: all keys have no distance, and few keys have one."""

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from looseleaf import LLM, Select
from looseleaf.errors import InvalidOption
from looseleaf.llm.load import reference_model
from looseleaf_lab.cli.evals.evaluate import evaluate
from looseleaf_lab.evals.distance.arms import FULL
from looseleaf_lab.evals.distance.forced import decoded_distributions
from looseleaf_lab.evals.distance.logits import divergence
from looseleaf_lab.evals.distance.measure import DistanceMeter
from looseleaf_lab.evals.distance.selection import (
    BOUND,
    SelectionMeter,
    SelectionRow,
    smallest_budgets,
)
from looseleaf_lab.evals.run import AnswerFile
from looseleaf_lab.evals.task import Item
from looseleaf_lab.evals.world_tasks import NeedleTask


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(reference_model("causal"), dtype="float32", device="cpu", num_pages=200)


@pytest.fixture(scope="module")
def item() -> Item:
    return NeedleTask(400).items(range(1))[0]


def quest(ratio: float) -> Select:
    return Select("quest", ratio=ratio, dense_layers=(), dense_below=0)


def test_decode_rows_of_a_given_answer_have_the_distributions_of_its_scores(
    llm: LLM, item: Item
) -> None:
    answer, reference = DistanceMeter(llm, "chat").measure(item, [*item.answers[:1]], FULL, None)
    parts = SelectionMeter(llm, "causal")._parts(item)
    _, gold = llm.engine.prompts.continued(parts, item.answers[0])
    rows, progress = decoded_distributions(llm.engine, "forced", parts, gold, None)
    assert progress.outputs[0].answer[1:] == gold
    assert rows.shape == reference.gold.shape and divergence(reference.gold, rows) < 1e-6
    assert answer.report["kl"] == 0.0


def test_all_keys_equal_dense_decoding_and_few_keys_do_not(
    llm: LLM, item: Item, tmp_path: Path
) -> None:
    """A second run takes the figures of the first, and measures only what it has not."""
    path, policies = tmp_path / "answers.jsonl", [quest(0.02), quest(1.0)]
    meter = SelectionMeter(llm, "causal", AnswerFile(path), ("commit",))
    few, every = meter.measure("needle", [item], policies)
    assert every.kl < 1e-6 and abs(every.nll) < 1e-4 and every.pages_read == 1.0
    assert few.kl > 10 * every.kl and few.pages_read < 0.7
    again = SelectionMeter(llm, "causal", AnswerFile(path), ("commit",))
    assert again.measure("needle", [item], policies) == [few, every] and again._count == 0
    shared = replace(quest(0.02), anchors=(0,))
    assert again.measure("needle", [item], [*policies, shared])[:2] == [few, every]
    # dense decoding and the new policy
    assert again._count == 2


def test_the_smallest_budget_is_near_dense_decoding_in_every_file() -> None:
    def row(file: str, arm: str, pages_read: float, nll: float) -> SelectionRow:
        return SelectionRow("m", file, arm, "cpu", 9, 1.0, pages_read, *(nll,) * 4, *(0.1,) * 3)

    rows = [
        (quest(0.1), row("a", "quest, ratio 0.1", 0.1, 0.0)),
        (quest(0.1), row("b", "quest, ratio 0.1", 0.1, 2 * BOUND)),
        (quest(0.2), row("a", "quest, ratio 0.2", 0.2, 0.0)),
        (quest(0.2), row("b", "quest, ratio 0.2", 0.2, BOUND)),
        (quest(0.4), row("a", "quest, ratio 0.4", 0.4, 0.0)),
        (quest(0.4), row("b", "quest, ratio 0.4", 0.4, 0.0)),
    ]
    assert smallest_budgets(rows) == {"quest": "quest, ratio 0.2"}
    assert smallest_budgets(rows[:2]) == {"quest": ""}


def test_the_command_names_the_smallest_budget(tmp_path: Path) -> None:
    model = ["--model", "looseleaf-reference-causal", "--dtype", "float32", "--num-pages", "200"]
    needles = ["--needles", "2", "--tokens", "300"]
    flags = ["--select", "quest", "--budget", "1.0", "--anchors", "2,4"]
    flags += ["--output", str(tmp_path / "rows.csv")]
    result = CliRunner().invoke(evaluate, ["selection", *model, *needles, *flags])
    assert result.exception is None, result.output
    assert "quest: quest, ratio 1 is the smallest budget" in result.output.splitlines()[-1]
    rows = (tmp_path / "rows.csv").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 3 and "anchors 2 4" in rows[-1]
    for wrong, sentence in (
        ([], "give a --select"),
        (["--select", "quest", "--revise", "4"], "without --revise"),
        (["--select", "retrieval"], "policies that choose pages"),
    ):
        result = CliRunner().invoke(evaluate, ["selection", *model, *wrong])
        assert isinstance(result.exception, InvalidOption) and sentence in str(result.exception)

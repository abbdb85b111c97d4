"""Calibration: what it measures, on documents whose truth is known, and what it proposes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from looseleaf import LLM, Document, Fuse
from looseleaf.errors import InvalidOption, InvalidRequest
from looseleaf.llm.load import reference_model
from looseleaf_lab.cli.evals.calibrate import calibrate
from looseleaf_lab.evals.calibration import TRIED_RATIO, Calibration, CalibrationRow, propose

TEXTS = (
    "The seal of Orlen Gate is anchor. The archive is in the north wing.",
    "As in Orlen Gate, the seal of Mill House stays unchanged.",
    "As in Mill House, the seal of Taqui Bridge stays unchanged.",
)
QUESTION = "What is the seal of Taqui Bridge?"


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    llm = LLM(reference_model("causal"), dtype="float32")
    return Calibration(llm, "causal", [Document(text) for text in TEXTS], [QUESTION])


def test_everything_computed_again_deviates_in_nothing(calibration: Calibration) -> None:
    row = calibration.measure(Fuse("all"))
    assert row.agreement == 1.0
    assert row.kl < 1e-6 and row.text_deviation < 1e-4 and row.deviation_left < 1e-6
    assert row.cost == row.recomputed > 0.5


def test_plain_reuse_deviates_in_everything(calibration: Calibration) -> None:
    row = calibration.measure(Fuse("none"))
    assert row.agreement == 0.0
    assert row.kl > 0.01 and row.text_deviation > 0.01
    assert (row.deviation_left, row.recomputed, row.cost) == (1.0, 0.0, 0.0)


def test_a_larger_share_leaves_less_of_the_deviation(calibration: Calibration) -> None:
    left = [calibration.measure(Fuse("oracle", ratio=r)).deviation_left for r in (0.1, 0.3, 0.6)]
    assert left == sorted(left, reverse=True) and left[0] > left[-1]
    # no selector leaves less than the one that knows
    assert calibration.measure(Fuse("random", ratio=0.3)).deviation_left > left[1]


def test_a_sweep_compares_layers_first_and_then_ratios(calibration: Calibration) -> None:
    rows = calibration.sweep(["deviation"], [0.15, 0.3])
    tried = [(fuse.selector, fuse.ratio, fuse.check_layers) for fuse, _ in rows]
    assert tried[0][0] == "none"
    layers = {layers for _, ratio, layers in tried if ratio == 0.15}
    assert {(1,), (2,)} <= layers
    assert len([1 for _, ratio, _ in tried if ratio == 0.3]) == 1
    assert tried == list(dict.fromkeys(tried))


def test_of_layers_that_answer_as_well_the_cheapest_goes_through_the_ratios(
    calibration: Calibration,
) -> None:
    rows = calibration.sweep(["deviation"], [0.5])
    tried = [(fuse, row) for fuse, row in rows if fuse.ratio == TRIED_RATIO]
    most = max(row.agreement for _, row in tried)
    cheapest = min(
        (fuse for fuse, row in tried if row.agreement == most), key=lambda fuse: fuse.check_layers
    )
    assert len({fuse.check_layers for fuse, _ in tried}) > 2
    assert rows[-1][0] == replace(cheapest, ratio=0.5)


def test_documents_that_depend_on_each_other_are_told_from_those_that_do_not(
    calibration: Calibration,
) -> None:
    chosen = propose(calibration.sweep(["first", "links"], [0.15, 0.3]), 0.02)
    assert chosen is not None and chosen[0].selector == "links"
    assert chosen[1].agreement == 1.0 and chosen[1].cost < 0.6
    alone = [Document(text) for text in (TEXTS[0], "Mira Tolland lives in Quorin.")]
    apart = Calibration(calibration.llm, "causal", alone, ["Where does Mira Tolland live?"])
    chosen = propose(apart.sweep(["first", "links"], [0.15]), 0.02)
    assert chosen is not None and chosen[0].selector == "none"


def row(selector: str, agreement: float, cost: float, kl: float = 0.1) -> CalibrationRow:
    return CalibrationRow("m", selector, 0.1, "", "", "", 50, agreement, kl, 0.1, 0.5, cost, cost)


def test_the_cheapest_within_the_tolerance_is_proposed() -> None:
    rows = [
        (Fuse("none"), row("none", 0.5, 0.0)),
        (Fuse("links"), row("links", 0.98, 0.2)),
        (Fuse("question"), row("question", 0.98, 0.2, kl=0.01)),
        (Fuse("all"), row("all", 1.0, 1.0)),
    ]
    assert propose(rows, 0.02) == rows[2]
    assert propose(rows, 0.01) == rows[3]
    assert propose(rows, 0.5) == rows[0]
    assert propose(rows[:1], 0.1) is None


def test_one_document_or_no_question_is_refused() -> None:
    llm = LLM(reference_model("causal"), dtype="float32")
    cases: list[tuple[Sequence[str], list[str], str]] = [
        (TEXTS[:1], [QUESTION], "give two or more, not 1"),
        (TEXTS, [], "give a question"),
    ]
    for documents, questions, sentence in cases:
        with pytest.raises(InvalidRequest, match=sentence):
            Calibration(llm, "causal", [Document(text) for text in documents], questions)


def test_the_command_prints_a_table_proposes_and_writes_rows(tmp_path: Path) -> None:
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    output = tmp_path / "rows.csv"
    arguments = ["--checkpoint", "causal", "-d", str(tmp_path), "-q", QUESTION]
    arguments += ["--fuse", "question", "--ratio", "0.3", "--output", str(output)]
    done = CliRunner().invoke(calibrate, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    assert 'proposed: {"selector": "question"' in done.output
    rows = output.read_text(encoding="utf-8").splitlines()
    assert len(rows) - 1 == len(done.output.splitlines()) - 3
    # it agreed in the one question there is, which says little of the next
    assert "agrees in 1 of 1 questions" in done.output.splitlines()[-1]
    assert "up to 79.3% of answers may differ: give more questions" in done.output
    assert "agreement" in rows[0] and "commit" in rows[0]
    assert ",causal,question," in rows[-1]
    both = CliRunner().invoke(calibrate, ["folder", *arguments])
    assert isinstance(both.exception, InvalidOption) and "not both" in str(both.exception)


def test_questions_that_are_no_text_are_refused(tmp_path: Path) -> None:
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    listed = tmp_path / "questions"
    listed.write_bytes(b"caf\xe9?")
    documents = ["-d", str(tmp_path / "0.txt"), "-d", str(tmp_path / "1.txt")]
    for flags, reason in (
        (["--questions", str(listed)], "can't be read"),
        (["-q", " "], "-q needs a question"),
    ):
        done = CliRunner().invoke(calibrate, ["--checkpoint", "causal", *documents, *flags])
        assert isinstance(done.exception, InvalidOption) and reason in str(done.exception)


def test_a_selector_that_looks_at_no_layer_is_tried_at_the_ratios_asked_for_only(
    calibration: Calibration,
) -> None:
    rows = calibration.sweep(["first"], [0.4])
    assert [(fuse.selector, fuse.ratio) for fuse, _ in rows] == [("none", None), ("first", 0.4)]

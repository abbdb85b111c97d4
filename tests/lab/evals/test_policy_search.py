"""The policy file of a model: its search, and what requests of an engine with the file read."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from looseleaf import LLM, Fuse
from looseleaf.config import PolicyFile
from looseleaf.errors import InvalidOption
from looseleaf.llm.load import reference_model
from looseleaf_lab.cli.evals.calibrate import calibrate
from looseleaf_lab.evals.distance.arms import REUSE, choose_arms, of_policy, with_primer
from looseleaf_lab.evals.distance.calibrate import Goal, choose_arm
from looseleaf_lab.evals.distance.measure import DistanceMeter
from looseleaf_lab.evals.distance.primer import PASSAGES, read_primer
from looseleaf_lab.evals.distance.summary import summarize
from looseleaf_lab.evals.task import Item

TEXTS = (
    "The seal of Orlen Gate is anchor.",
    "As in Orlen Gate, the seal of Mill House stays unchanged.",
    "As in Mill House, the seal of Taqui Bridge stays unchanged.",
)
PRIMER = ("The archive of Quorin is in the north wing.", "Mira Tolland lives in Quorin.")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(reference_model("causal"), dtype="float32", device="cpu")


def test_a_primed_arm_answers_as_an_engine_with_the_policy_file(llm: LLM, tmp_path: Path) -> None:
    item = Item("0", TEXTS, "What is the seal of Taqui Bridge?", (), 12)
    fuse, path = Fuse("question", ratio=0.3), tmp_path / "policy.json"
    arm = with_primer(of_policy(fuse))
    meter = DistanceMeter(llm, "chat", 12, PRIMER)
    answer, _ = meter.measure(item, [], arm, None)
    _, reference = meter.measure(item, [], REUSE, None)
    primed, _ = meter.measure(item, [], with_primer(REUSE), reference)
    assert primed.report["kl"] > 1e-4 and primed.report["recomputed"] == 0
    PolicyFile.of(llm.engine.runner.model.config, fuse, PRIMER).write(path)
    other = LLM(reference_model("causal"), dtype="float32", device="cpu", policy=str(path))
    mine, _ = DistanceMeter(other, "chat", 12).measure(item, [], REUSE, None)
    assert mine.text == answer.text
    assert mine.report["recomputed"] == answer.report["recomputed"] > 0


def test_primed_arms_are_those_that_reuse_documents() -> None:
    arms = choose_arms(("none",), [Fuse("ape"), Fuse("all"), Fuse("first")], 8, primed=True)
    assert [arm.name for arm in arms if arm.primed] == ["primer", "primer, first, 16 tokens"]
    names = [
        arm.name
        for arm in choose_arms((), [Fuse("question"), Fuse("question", watched_share=1.0)], 8)
    ]
    assert len(set(names)) == len(names) == 4


def test_the_least_divergence_at_the_wanted_speed_is_chosen() -> None:
    def figures(kl: float, first_token: float) -> dict[str, float]:
        names = ("nll", "kl_answer", "agrees", "f1", "document_tokens", "recomputed")
        return {**dict.fromkeys(names, 1.0), "kl": kl, "first_token": first_token}

    labels = {"model": "m", "file": "f", "part": "all", "device": "cpu"}
    full, reuse = [figures(0.0, 6.0)] * 4, [figures(1.0, 0.5)] * 4
    kinds: dict[Any, tuple[float, float]] = {
        REUSE: (1.0, 0.5),
        with_primer(REUSE): (0.2, 0.5),
        of_policy(Fuse("question")): (0.1, 3.0),
        of_policy(Fuse("links")): (0.05, 7.0),
    }
    rows = {
        arm: summarize(labels, arm.name, [figures(*own)] * 4, full, reuse)
        for arm, own in kinds.items()
    }
    chosen = [choose_arm(rows, Goal(sooner=factor)) for factor in (100, 3, 1.5, 0.5)]
    assert chosen == [REUSE, with_primer(REUSE), *list(kinds)[2:]]
    met = rows[of_policy(Fuse("question"))]
    assert Goal(sooner=2).is_met(met) and not Goal().is_met(met)
    assert not Goal(sooner=2).is_met(replace(met, agreement=0.7))


def test_the_command_writes_a_file_that_engines_take(tmp_path: Path) -> None:
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    path, rows = tmp_path / "policy.json", tmp_path / "rows.csv"
    arguments = ["--checkpoint", "causal", "--dtype", "float32", "-d", str(tmp_path)]
    arguments += [
        "-q",
        "What is the seal of Taqui Bridge?",
        "-q",
        "What is the seal of Mill House?",
    ]
    primer = tmp_path / "primer"
    primer.write_text(PRIMER[0], encoding="utf-8")
    arguments += ["--fuse", "first", "--ratio", "0.15", "--save", str(path)]
    arguments += ["--primer", str(primer)]
    result = CliRunner().invoke(
        calibrate, [*arguments, "--sooner", "0", "--output", str(rows)], catch_exceptions=False
    )
    assert "on 1 other questions" in result.output
    with rows.open(encoding="utf-8") as file:
        parts = [row["part"] for row in csv.DictReader(file)]
    assert parts.count("decide") == 1 and parts.count("develop") >= 4
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["measured"]["questions"] == 1 and content["primer"] in ([], [PRIMER[0]])
    LLM(reference_model("causal"), dtype="float32", device="cpu", policy=str(path)).engine.close()


def test_options_without_their_meaning_are_refused(tmp_path: Path) -> None:
    listed = tmp_path / "questions.jsonl"
    listed.write_text("", encoding="utf-8")
    save = ["--save", str(tmp_path / "policy.json")]
    for flags, sentence in (
        (["--file", str(listed)], "give --save, too"),
        (save, "give questions"),
        ([*save, "-q", "Why?"], "give two documents"),
        ([*save, "--file", str(listed)], "no entries"),
    ):
        result = CliRunner().invoke(calibrate, ["--checkpoint", "causal", *flags])
        assert isinstance(result.exception, InvalidOption) and sentence in str(result.exception)
    blank = tmp_path / "blank"
    blank.write_text(" ", encoding="utf-8")
    with pytest.raises(InvalidOption, match="is empty"):
        read_primer([str(blank)])
    with pytest.raises(InvalidOption, match="can't be read"):
        read_primer([str(tmp_path / "absent")])
    assert read_primer(["default"]) == PASSAGES

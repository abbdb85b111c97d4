"""``looseleaf eval`` as a user calls it."""

import csv
from pathlib import Path

import pytest

from tests.cli.conftest import Run


def test_figures_are_shown_and_appended_with_their_origin(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "evals.csv"
    asked = ("eval", "world", "lookup", "--checkpoint", "causal", "--questions", 2)
    result = run(*asked, "--documents", 2, "--output", output)
    assert result.code == 0, result.err
    assert "full attention" in result.out and "documents reused" in result.out
    rows = list(csv.DictReader(output.read_text(encoding="utf-8").splitlines()))
    assert [(row["arm"], row["items"], row["against"]) for row in rows] == [
        ("full attention", "2", ""),
        ("documents reused", "2", "full attention"),
    ]
    assert all(row["commit"] and row["setting"] == "2 documents" for row in rows)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--model", "a", "--checkpoint", "causal"), "give one of --model and --checkpoint"),
        (("--endpoint", "http://x", "--model", "a"), "give one of --model and --endpoint"),
        (("--endpoint", "http://x"), "--endpoint needs --served-model"),
        (("--arm", "nobody"), "unknown arm 'nobody': there are full, reuse"),
        (("--questions", "0"), "--questions must be at least 1"),
        (("--documents", "0"), "--documents must be at least 1"),
        (("--batch", "0"), "--batch must be at least 1"),
        (("--first-seed", "-1"), "held-out worlds have seeds 0"),
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

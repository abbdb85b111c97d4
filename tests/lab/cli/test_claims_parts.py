"""What ``make gpu-report ONLY=claims`` asks of a GPU, at toy sizes on a CPU."""

import csv
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tools.gpu_report import BENCHMARKS, benchmark_part, figures


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["fuse-short", "tiers"])
def test_a_part_ends_well_and_leaves_rows_that_can_be_shown(
    name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a test's process holds so much that looking through it takes longer than what is measured
    monkeypatch.setattr("gc.collect", lambda: 0)
    (benchmark,) = (candidate for candidate in BENCHMARKS if candidate.name == name)
    part = benchmark_part(benchmark, "cpu", tmp_path, tiny=True)
    assert part.rows is not None
    # without the interpreter and its module
    result = run(*part.command[3:])
    assert result.code == 0, result.err
    with part.rows.open(newline="", encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == len(figures(part.rows))

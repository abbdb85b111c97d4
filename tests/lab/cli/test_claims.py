"""``looseleaf bench hits``, ``relay`` and ``lazy`` as a user calls them."""

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest

from looseleaf.errors import InvalidOption
from tests.cli.conftest import Run


def test_hits_writes_its_rows_and_tells_the_closed_form(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "hits.csv"
    sizes = ("--documents", 30, "--requests", 20, "--document-tokens", 64)
    result = run("bench", "hits", *sizes, "--output", output)
    assert result.code == 0, result.err
    assert "closed form 2.86" in result.err
    rows = list(csv.DictReader(output.read_text(encoding="utf-8").splitlines()))
    assert len(rows) == (9 + 1) * 5
    assert {row["per_request"] for row in rows} == {"5", "20"}


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (("hits", "--per-request", 2000), "--documents must be at least --per-request"),
        (("hits", "--document-tokens", 1), "must be positive"),
        (("relay", "--prefix", -1), "-1 is not in the range x>=1"),
        (("relay", "--requests", 0), "0 is not in the range x>=1"),
        (("relay", "--shape", "none"), "unknown shape 'none'"),
        (("relay", "--heads", 6, 4, 64), "a multiple of the second"),
        (("lazy", "--documents", 2), "--documents must be at least 5"),
        (("lazy", "--capacity", 0), "0 is not in the range x>=1"),
        (("lazy", "--document-tokens", 1), "--document-tokens must be at least 2"),
        (("lazy", "--alpha", -1), "--alpha must be 0"),
        (("lazy", "--shape", "none"), "unknown shape 'none'"),
        (("rate", "--per-request", 500), "--per-request must be from 1 to --documents"),
        (("rate", "--rate", 4, "--rate", 2), "must be positive and rise"),
        (("rate", "--hold", -1), "--hold and --longest must be 0 seconds or more"),
        (("rate", "--fuse", "none"), "takes no budget"),
        (("rate", "--shape", "none"), "unknown shape 'none'"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(
    run: Run, command: tuple[object, ...], reason: str
) -> None:
    result = run("bench", *command)
    assert (result.code, result.out) == (2, "")
    assert reason in result.err and "Traceback" not in result.err


def test_a_run_that_is_cut_keeps_the_rows_that_it_had(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*arguments: object) -> Iterator[dict[str, object]]:
        yield {"measurement": "first token", "arm": "once", "value": 2.0, "unit": "ms"}
        raise InvalidOption("the machine went away")

    monkeypatch.setattr("looseleaf_lab.bench.lazy.measure", cut)
    output = tmp_path / "lazy.csv"
    assert run("bench", "lazy", "--device", "cpu", "--output", output).code != 0
    (row,) = csv.DictReader(output.read_text(encoding="utf-8").splitlines())
    assert (row["arm"], row["value"]) == ("once", "2.0")

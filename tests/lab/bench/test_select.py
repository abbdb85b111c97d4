"""``bench select`` counts what it says it reads, and keeps what it has counted."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import looseleaf_lab.bench.select
from looseleaf.config import Select
from looseleaf.errors import InvalidOption
from looseleaf_lab.bench.results import Row
from looseleaf_lab.bench.select import SelectBench, measure
from looseleaf_lab.cli.bench.select import select


def test_rows_say_what_dense_decoding_and_a_policy_read() -> None:
    policy = Select("quest", tokens=64, dense_layers=(0,))
    device = torch.device("cpu")
    bench = SelectBench("tiny", policy, (320,), (2,), (1, 3), 3, 1, device, served=(4,))
    by_name = {(row["what"], row["arm"]): row for row in measure(bench)}
    shared = "one choice for 4 layers"
    attention = [("attention", name) for name in ("dense", "select", shared)]
    sealing = [("sealing", name) for name in ("one page", "all pages")]
    tokens = [("token", "dense"), ("token", "left alone"), ("token", shared)]
    tokens += [("token", name) for name in ("select", "w=3", "w<=3 is 3")]
    assert list(by_name) == [*attention, *sealing, *tokens]
    megabytes = {name: float(row["mb"]) * 1e6 for name, row in by_name.items()}
    # two rows of 20 pages, two KV heads of 16 dims, keys and values in bf16 or fp32
    itemsize = megabytes["attention", "dense"] / (2 * 20 * 2 * 2 * 16 * 16)
    assert round(itemsize) in (2, 4)
    pages = 2 * 2 * 4 * 2 * 16 * 16 * itemsize
    bounds = 2 * 2 * 19 * 2 * 16 * itemsize
    assert abs(megabytes["attention", "select"] - pages - bounds) < 1
    # three of four layers read no bounds
    assert abs(megabytes["attention", shared] - pages - bounds / 4) < 1
    # of the one layer that chooses: five states read or written a row, and registers
    states = 2 * (5 * 4 * 17 * 4 + 2 * 2 * 20) + 2 * 2 * 2 * 2 * 2 * 16 * itemsize
    more = megabytes["token", "w=3"] - megabytes["token", "select"]
    assert states <= more <= states + 2 * 2 * 2 * 2 * 16 * 16 * itemsize


def test_a_policy_that_keeps_nothing_of_pages_is_refused() -> None:
    with pytest.raises(InvalidOption, match="use quest or representatives"):
        SelectBench("tiny", Select("window"), (64,), (1,), (1,), 2, 1, torch.device("cpu"))
    with pytest.raises(InvalidOption, match="serves 2 layers or more"):
        SelectBench("tiny", Select(), (64,), (1,), (1,), 2, 1, torch.device("cpu"), served=(1,))


def test_a_run_that_is_cut_keeps_the_rows_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*anything: Any) -> list[Row]:
        raise KeyboardInterrupt

    monkeypatch.setattr(looseleaf_lab.bench.select, "_token_rows", cut)
    kept = tmp_path / "rows.csv"
    options = ["--shape", "tiny", "--context", "64", "--budget", "32", "--repetitions", "1"]
    CliRunner().invoke(select, [*options, "--output", str(kept)])
    with kept.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["arm"] for row in rows] == ["dense", "select", "one page", "all pages"]
    assert {row["what"] for row in rows} == {"attention", "sealing"}

"""`looseleaf bench fleet` writes a row for each router and tier."""

import csv

import pytest
from click.testing import CliRunner

from looseleaf.cli import app

SMALL = ["--requests", "60", "--replicas", "2", "--documents", "9"]


def test_each_policy_has_a_row(tmp_path):
    output = tmp_path / "fleet.csv"
    done = CliRunner().invoke(app, ["bench", "fleet", *SMALL, "--output", str(output)])
    assert done.exit_code == 0, done.output
    with output.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 and {row["tier"] for row in rows} == {"none", "shared"}


@pytest.mark.parametrize("flags", [["--requests", "0"], ["--rate", "0"]])
def test_sizes_are_positive(flags):
    done = CliRunner().invoke(app, ["bench", "fleet", *flags])
    assert done.exit_code != 0

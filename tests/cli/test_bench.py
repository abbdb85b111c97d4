"""``looseleaf bench``: of nothing there is nothing to measure."""

import click
import pytest

from looseleaf.cli.bench import bench
from tests.cli.conftest import Run


@pytest.mark.parametrize(
    "name", [n for n, c in bench.commands.items() if any(o.name == "repetitions" for o in c.params)]
)
def test_a_number_of_nothing_is_refused_before_anything_is_measured(run: Run, name: str) -> None:
    result = run("bench", name, "--repetitions", 0)
    assert result.code == 2
    assert "Invalid value for '--repetitions': 0 is not in the range x>=1" in result.err


def test_every_whole_number_but_a_seed_counts_something() -> None:
    free = {
        (name, option.opts[0])
        for name, command in bench.commands.items()
        for option in command.params
        if option.type is click.INT
    }
    assert free == {(n, "--seed") for n in ("index", "reuse", "serve")} | {("fuse", "--batches")}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("reuse", "--documents", 3, "--per-request", 5), "--per-request is more than"),
        (("tiers", "--folder", "/no/such/folder"), "does not exist"),
        (("index", "--keys", 10), "not in the range x>=1024"),
    ],
    ids=str,
)
def test_sizes_that_do_not_go_together_are_refused(
    run: Run, arguments: tuple[object, ...], said: str
) -> None:
    result = run("bench", *arguments)
    assert result.code == 2
    assert said in result.err

"""``looseleaf bench``: of nothing there is nothing to measure."""

import sys
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import click
import pytest

from looseleaf_lab.cli.bench.commands import bench
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
    seeded = ("agents", "fleet", "hybrids", "index", "reuse", "serve")
    indexes = {("fuse", "--batches"), ("agents", "--skipped")}
    assert free == {(name, "--seed") for name in seeded} | indexes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("reuse", "--documents", 3, "--per-request", 5), "--per-request must be at most"),
        (("tiers", "--folder", "/no/such/folder"), "does not exist"),
        (("index", "--keys", 10), "not in the range x>=1024"),
    ],
    ids=str,
)
def test_sizes_that_do_not_go_together_are_refused(
    run: Run, arguments: tuple[object, ...], message: str
) -> None:
    result = run("bench", *arguments)
    assert result.code == 2
    assert message in result.err


class _Measured(Exception):
    """The first measurement would begin here."""


@pytest.mark.parametrize("name", bench.commands)
def test_a_header_comes_before_the_first_measurement(
    run: Run, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Title, sizes, device and threads, though a first figure may take minutes."""
    seen: list[str] = []

    def measure(*arguments: object, **options: object) -> NoReturn:
        sys.stderr.flush()
        seen.append(capsys.readouterr().err)
        raise _Measured

    at = {"fleet": ("looseleaf_lab.cli.bench.fleet", "_simulated")}
    path, function = at.get(name, (f"looseleaf_lab.bench.{name.replace('-', '_')}", "measure"))
    module = import_module(path)
    monkeypatch.setattr(module, function, measure)
    if name == "hosted":  # which refuses a machine without CUDA
        monkeypatch.setattr(module.HostedBench, "__post_init__", lambda bench: None)
    with pytest.raises(_Measured):
        needed = {"http": ("--self", "tiny"), "llamacpp": (__file__,)}
        run("bench", name, *needed.get(name, ()))
    title, sizes, device, threads = seen[0].splitlines()[:4]
    assert title.startswith(f"bench {name}: ")
    assert sizes.startswith("  sizes: ") and any(map(str.isdigit, sizes))
    assert device.startswith(("  device: cpu", "  device: cuda"))
    assert threads.startswith("  threads: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ("hits", "--requests", 10, "--documents", 10, "--budget", 1, "--alpha", 1.1),
        ("attention", "--longest", 64, "--rows", 2, "--repetitions", 1, "--head-dim", 32,
         "--case", "decode, 2 x", "--no-peers"),
    ],
    ids=lambda arguments: arguments[0],
)  # fmt: skip
def test_each_step_is_said_before_its_figures(
    run: Run, arguments: tuple[object, ...], tmp_path: Path
) -> None:
    result = run("bench", *arguments, "--output", tmp_path / "rows.csv")
    assert result.code == 0, result.err
    assert " s  1 of " in result.err

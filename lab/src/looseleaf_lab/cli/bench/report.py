"""What every ``looseleaf bench`` command does with its rows: each is told and kept in a file as it
is measured, so that a run that is cut keeps what it had; at the end a table of all of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from looseleaf_lab.bench.progress import Progress


def appendable(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Refuses a file that rows can't be appended to, before anything is measured."""
    from looseleaf_lab.bench.results import require_appendable

    if value is not None:
        require_appendable(value)
    return value


DEVICE = click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1 ...")
FOLDER = click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="where the disk tier writes [default: the system's folder for temporary files]",
)
OUTPUT = click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=appendable,
    help="CSV file to append to [default: results/<name>.csv if there is a results folder]",
)


@contextmanager
def measuring(config: Any, device: object) -> "Iterator[Progress]":
    """The progress of the running command on standard error, behind a header: what is measured,
    sizes (numbers and words of ``config``, a dataclass or a mapping), device and threads."""
    import torch
    from rich.console import Console

    from looseleaf_lab.bench.origin import describe_origin
    from looseleaf_lab.bench.progress import ConsoleProgress

    command = click.get_current_context().command
    progress = ConsoleProgress(Console(stderr=True))
    progress.header(
        f"bench {command.name}: {command.get_short_help_str(200)}",
        {
            "sizes": ", ".join(f"{name} {value}" for name, value in _sizes(config)),
            "device": f"{device} ({describe_origin()['hardware']})",
            "threads": torch.get_num_threads(),
        },
    )
    with progress.live():
        yield progress


def _sizes(config: Any) -> Iterator[tuple[str, str]]:
    """Names and values of what can be said in a word; several values with slashes."""
    fields: Mapping[str, Any] = asdict(config) if is_dataclass(config) else config  # type: ignore[arg-type]
    for name, value in fields.items():
        values = value if isinstance(value, (tuple, list)) else (value,)
        if values and all(isinstance(one, (int, float, str)) for one in values):
            yield name.replace("_", " "), "/".join(map(str, values))


def report(
    rows: Sequence[Any], title: str, shown: Sequence[str], output: Path | None, name: str
) -> None:
    """Show some columns of ``rows`` and append all to ``output``, or to ``results/<name>.csv``."""
    from looseleaf_lab.bench.origin import describe_origin
    from looseleaf_lab.bench.results import append_rows, show_table

    show_table(rows, title, shown)
    target = target_of(output, name)
    if target is not None:
        append_rows(target, rows, describe_origin())
        click.echo(f"appended to {target}", err=True)


def collect(
    measured: Iterable[Any], say: Callable[[Any], str], output: Path | None, name: str
) -> list[Any]:
    """All rows; each is told by what ``say`` makes of it, and kept, as soon as it is measured."""
    from looseleaf_lab.bench.origin import describe_origin
    from looseleaf_lab.bench.results import append_rows

    rows, target, origin = [], target_of(output, name), describe_origin()
    for row in measured:
        rows.append(row)
        if target is not None:
            append_rows(target, [row], origin)
        click.echo(say(row), err=True)
    return rows


def target_of(output: Path | None, name: str) -> Path | None:
    """Where rows go: to ``output``, or to ``results/<name>.csv`` if there is such a folder."""
    return output or (Path("results") / f"{name}.csv" if Path("results").is_dir() else None)

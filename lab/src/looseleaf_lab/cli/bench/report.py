"""Output of all ``looseleaf bench`` commands: progress, rows in a file, and a final table.

Each row is printed and appended when it is measured, so an interrupted run keeps its rows."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from looseleaf_lab.bench.progress import Progress


def check_appendable(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """An option callback that rejects a file to which rows can't be appended."""
    from looseleaf_lab.bench.results import require_appendable

    if value is not None:
        require_appendable(value)
    return value


DEVICE = click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1 ...")
FOLDER = click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="folder of the disk tier [default: the system's folder for temporary files]",
)
OUTPUT = click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=check_appendable,
    help="CSV file to append to [default: results/<name>.csv if there is a results folder]",
)


@contextmanager
def bench_progress(config: Any, device: object) -> "Iterator[Progress]":
    """The running command's progress on standard error, after a header with its sizes and device.

    Sizes are the numbers and words of ``config``, a dataclass or a mapping."""
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
    """Names and values of the fields with plain values; slashes join several values."""
    fields: Mapping[str, Any] = asdict(config) if is_dataclass(config) else config  # type: ignore[arg-type]
    for name, value in fields.items():
        values = value if isinstance(value, (tuple, list)) else (value,)
        if values and all(isinstance(item, (int, float, str)) for item in values):
            yield name.replace("_", " "), "/".join(map(str, values))


def report(
    rows: Sequence[Any], title: str, columns: Sequence[str], output: Path | None, name: str
) -> None:
    """Print ``columns`` of ``rows``, and append all to ``output`` or ``results/<name>.csv``."""
    from looseleaf_lab.bench.origin import describe_origin
    from looseleaf_lab.bench.results import append_rows, show_table

    show_table(rows, title, columns)
    target = target_of(output, name)
    if target is not None:
        append_rows(target, rows, describe_origin())
        click.echo(f"appended to {target}", err=True)


def collect(
    row_source: Iterable[Any], summarize: Callable[[Any], str], output: Path | None, name: str
) -> list[Any]:
    """All rows; each is appended, and printed as ``summarize`` returns it, when measured."""
    from looseleaf_lab.bench.origin import describe_origin
    from looseleaf_lab.bench.results import append_rows

    rows, target, origin = [], target_of(output, name), describe_origin()
    for row in row_source:
        rows.append(row)
        if target is not None:
            append_rows(target, [row], origin)
        click.echo(summarize(row), err=True)
    if target is not None:
        click.echo(f"appended to {target}", err=True)
    return rows


def target_of(output: Path | None, name: str) -> Path | None:
    """The file for rows: ``output``, or ``results/<name>.csv`` if that folder exists, or None."""
    return output or (Path("results") / f"{name}.csv" if Path("results").is_dir() else None)

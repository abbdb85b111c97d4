"""How every ``looseleaf bench`` command ends: a table on the screen, rows in a file."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

OUTPUT = click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="CSV file to append to [default: results/<name>.csv if there is a results folder]",
)


def report(
    rows: Sequence[Any], title: str, shown: Sequence[str], output: Path | None, name: str
) -> None:
    """Show some columns of ``rows`` and append all to ``output``, or to ``results/<name>.csv``."""
    from looseleaf.bench.results import show_table

    show_table(rows, title, shown)
    append(rows, output, name)


def keeper(output: Path | None, name: str) -> Callable[[Any], None]:
    """What appends a row as soon as it is measured, so that a run that is cut keeps what it had."""
    from looseleaf.bench.origin import describe_origin
    from looseleaf.bench.results import append_rows

    target, origin = _target(output, name), describe_origin()

    def keep(row: Any) -> None:
        if target is not None:
            append_rows(target, [row], origin)

    return keep


def append(rows: Sequence[Any], output: Path | None, name: str) -> None:
    """Append ``rows`` to ``output``, or to ``results/<name>.csv`` if there is such a folder."""
    from looseleaf.bench.origin import describe_origin
    from looseleaf.bench.results import append_rows

    target = _target(output, name)
    if target is not None:
        append_rows(target, rows, describe_origin())
        click.echo(f"appended to {target}", err=True)


def _target(output: Path | None, name: str) -> Path | None:
    return output or (Path("results") / f"{name}.csv" if Path("results").is_dir() else None)

"""Result rows: appended to a CSV file with their origin, and printed as a table."""

import csv
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from looseleaf.errors import InvalidOption

Cell = str | int | float
Row = dict[str, Cell]


def append_rows(path: Path, rows: Sequence[Mapping[str, Cell]], origin: Mapping[str, str]) -> None:
    """Append rows to ``path``; all rows of a file have the same columns.

    Raises InvalidOption if the file has other columns or can't be written.
    """
    names = [*origin, *rows[0]]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        if not is_new:
            _require_columns(path, names)
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names)
            if is_new:
                writer.writeheader()
            for row in rows:
                writer.writerow({**origin, **{k: _cell(v) for k, v in row.items()}})
    except OSError as error:
        raise InvalidOption(f"rows can't be written to {path}: {error.strerror}") from error


def require_appendable(path: Path, columns: Sequence[str] | None = None) -> None:
    """Check in advance that `append_rows` will succeed; writes nothing.

    Raises InvalidOption if the file has other ``columns`` or can't be written."""
    try:
        if path.exists():
            with path.open("a"):
                pass
            if columns is not None:
                _require_columns(path, columns)
        else:
            # missing folders will be created in the nearest existing one
            folder = next(parent for parent in path.absolute().parents if parent.exists())
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        raise InvalidOption(f"rows can't be written to {path}: {error.strerror}") from error


def _require_columns(path: Path, names: Sequence[str]) -> None:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            columns = next(csv.reader(file), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidOption(f"rows can't be written to {path}: it is no CSV file") from error
    if columns != list(names):
        raise InvalidOption(f"{path} has columns {columns}, not {list(names)}: choose another file")


def show_table(rows: Sequence[Mapping[str, Cell]], title: str, columns: Sequence[str]) -> None:
    """Print ``columns`` of the rows as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in columns:
        justify: Literal["left", "right"] = "left" if isinstance(rows[0][name], str) else "right"
        table.add_column(name.replace("_", " "), justify=justify)
    for row in rows:
        table.add_row(*(str(_cell(row[name])) for name in columns))
    Console().print(table)


def _cell(value: Cell) -> Cell:
    return float(f"{value:.4g}") if isinstance(value, float) else value

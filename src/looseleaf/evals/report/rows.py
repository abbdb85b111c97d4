"""Rows of result files, one of each kind."""

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from looseleaf.errors import InvalidOption

Row = dict[str, str]
_ORIGIN = ("date", "commit", "hardware", "python_version", "torch_version", "transformers_version")
_MEASURED = frozenset(
    ("value", "low", "high", "gain", "gain_low", "gain_high", "median", "reused", "relay_faster",
     "once_faster", "items", "seeds", "against", "predicted",
     "p95", "times_full")
)  # fmt: skip
_SETTING = re.compile(r"^(.*?),? (?:ratio|tokens|budget|share|top) ([\d.]+)(.*)$")


def read_rows(path: Path) -> list[Row]:
    """The rows of a file of results, of those that measure the same only one: that of most items,
    of these the newest.

    Rows measure the same if they differ in nothing but origin, seeds and figures. Raises
    InvalidOption if the file can't be read as CSV."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [dict(row) for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidOption(f"{path} can't be read: {error}") from error
    newest: dict[tuple[tuple[str, str], ...], Row] = {}
    for row in rows:
        kind = tuple(item for item in row.items() if item[0] not in _MEASURED | set(_ORIGIN))
        if kind in newest and int(row.get("items") or 0) < int(newest[kind].get("items") or 0):
            continue
        newest.pop(kind, None)
        newest[kind] = row
    return list(newest.values())


@dataclass(frozen=True)
class Series:
    """Values with their bounds over x, by the name that stands in the legend."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


def series_of(rows: Sequence[Row], name: str, points: Sequence[tuple[float, Row]]) -> Series:
    """A series of rows with ``value``, ``low`` and ``high`` in percent, ordered by x."""
    ordered = sorted(points, key=lambda point: point[0])
    columns = [
        tuple(100 * float(row[column]) for _, row in ordered) for column in ("value", "low", "high")
    ]
    return Series(name, tuple(x for x, _ in ordered), *columns)


def main_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows of each task's first metric: that which stands first in the file."""
    first: dict[str, str] = {}
    for row in rows:
        first.setdefault(row["task"], row["metric"])
    return [row for row in rows if row["metric"] == first[row["task"]]]


def length_of(row: Row) -> int | None:
    """The tokens of a setting such as ``"1024 tokens, 8 needles"``, None for others."""
    found = re.match(r"^(\d+) tokens(, \d+ needles)?$", row["setting"])
    return int(found[1]) if found else None


def policy_of(row: Row) -> tuple[str, float] | None:
    """An arm's name without its budget, and the budget: ``("links", 0.15)``; None without one."""
    found = _SETTING.match(row["arm"])
    return (found[1] + found[3], float(found[2])) if found else None


def by_machine(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """The rows of each machine, with a word for the names of its files."""
    # the number of threads tells nothing apart
    machines = [row["hardware"].partition(",")[0] for row in rows]
    for machine in dict.fromkeys(machines):
        word = re.sub(r"[^a-z0-9]+", "_", machine.lower()).strip("_")
        yield word, [row for row, own in zip(rows, machines, strict=True) if own == machine]


def origin_of(rows: Sequence[Row]) -> str:
    """Commits, days and hardware that figures come from, as a sentence's end."""
    commits = sorted({row["commit"] for row in rows})
    days = sorted({row["date"] for row in rows})
    machines = sorted({row["hardware"] for row in rows})
    return (
        f"{', '.join(machines)}; {days[0]}{f' to {days[-1]}' if len(days) > 1 else ''}; commit "
        + (", ".join(commits))
    )

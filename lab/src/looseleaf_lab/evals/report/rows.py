"""Rows of result files, one per kind of measurement."""

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from looseleaf.errors import InvalidOption

Row = dict[str, str]
ORIGIN = ("date", "commit", "hardware", "python_version", "torch_version", "transformers_version")
_MEASURED = frozenset(
    ("value", "low", "high", "gain", "gain_low", "gain_high", "median", "reused", "relay_faster",
     "once_faster", "items", "seeds", "against", "predicted",
     "p95", "times_full", "times_prefix", "times_best", "seconds", "seconds_low", "seconds_high",
     "load_seconds", "load_predicted", "total_predicted", "loaded_from", "mib",
     "ms", "ms_low", "ms_high",
     "load_ms", "compute_ms", "over_slower", "computed_again", "least", "most", "speedup", "mb",
     "repetitions", "floor", "share_of_roofline", "copy_tb_per_s", "matrix_tflop_per_s", "flops",
     "bytes", "error_share_of_budget", "looseleaf", "looseleaf_low", "looseleaf_high",
     "roofline_share", "terabytes_per_second", "teraflops")
)  # fmt: skip
_SETTING = re.compile(r"^(.*?),? (?:ratio|tokens|budget|share|top) ([\d.]+)(.*)$")


def read_rows(path: Path, *, per_machine: bool = False) -> list[Row]:
    """The rows of a file of results; of equal measurements only the newest with most items.

    Measurements are equal if all columns but origin, seeds and figures are; with ``per_machine``,
    also the machine. Raises InvalidOption if the file can't be read as CSV."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [dict(row) for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidOption(f"{path} can't be read: {error}") from error
    newest: dict[tuple[tuple[str, str], ...], Row] = {}
    for row in rows:
        kind = tuple(item for item in row.items() if item[0] not in _MEASURED | set(ORIGIN))
        if per_machine:
            kind += (("machine", _machine_of(row)),)
        if kind in newest and int(row.get("items") or 0) < int(newest[kind].get("items") or 0):
            continue
        newest.pop(kind, None)
        newest[kind] = row
    return list(newest.values())


@dataclass(frozen=True)
class Series:
    """Values with optional bounds over x, and the name in the legend."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


def series_of(rows: Sequence[Row], name: str, points: Sequence[tuple[float, Row]]) -> Series:
    """A series of ``value``, ``low`` and ``high`` in percent, ordered by x."""
    ordered = sorted(points, key=lambda point: point[0])
    columns = [
        tuple(100 * float(row[column]) for _, row in ordered) for column in ("value", "low", "high")
    ]
    return Series(name, tuple(x for x, _ in ordered), *columns)


def main_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows of each task's main metric: the first one in the file."""
    first: dict[str, str] = {}
    for row in rows:
        first.setdefault(row["task"], row["metric"])
    return [row for row in rows if row["metric"] == first[row["task"]]]


def length_of(row: Row) -> int | None:
    """The tokens of a setting such as ``"1024 tokens, 8 needles"``, None for others."""
    match = re.match(r"^(\d+) tokens(, \d+ needles)?$", row["setting"])
    return int(match[1]) if match else None


def policy_of(row: Row) -> tuple[str, float] | None:
    """An arm's name without its budget, and the budget: ``("links", 0.15)``; None without one."""
    match = _SETTING.match(row["arm"])
    return (match[1] + match[3], float(match[2])) if match else None


def group_series(
    rows: Sequence[Row],
    group: Callable[[Row], str],
    value: Callable[[Row], float],
    *,
    order: Sequence[str] = (),
    arms: Sequence[str] = (),
) -> tuple[tuple[Series, ...], tuple[str, ...]]:
    """A series per arm, over the names of groups.

    Groups are in ``order`` and series in the order of ``arms``; other names follow in the order of
    the rows."""
    # a repeated measurement with other counts replaces its bar
    newest = {(row["arm"], group(row)): row for row in rows}
    groups = in_order((group(row) for row in rows), order)
    series = []
    for arm in in_order((row["arm"] for row in rows), arms):
        rows_of_arm = {name: row for (row_arm, name), row in newest.items() if row_arm == arm}
        positions = tuple(float(groups.index(name)) for name in rows_of_arm)
        series.append(Series(arm, positions, tuple(value(row) for row in rows_of_arm.values())))
    return tuple(series), tuple(groups)


def in_order(names: Iterable[str], order: Sequence[str]) -> list[str]:
    """Distinct names in ``order``; other names follow in their own order."""
    distinct = list(dict.fromkeys(names))
    return sorted(distinct, key=lambda name: order.index(name) if name in order else len(order))


def line_series(rows: Sequence[Row], x: str, value: Callable[[Row], float]) -> tuple[Series, ...]:
    """A series per arm, over the numbers in column ``x``; the newest row counts."""
    series = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        points = sorted({float(row[x]): value(row) for row in rows if row["arm"] == arm}.items())
        series.append(Series(arm, tuple(p[0] for p in points), tuple(p[1] for p in points)))
    return tuple(series)


def by_machine(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """The rows of each machine, with a slug for file names."""
    machines = list(map(_machine_of, rows))
    for machine in dict.fromkeys(machines):
        slug = re.sub(r"[^a-z0-9]+", "_", machine.lower()).strip("_")
        yield (
            slug,
            [
                row
                for row, row_machine in zip(rows, machines, strict=True)
                if row_machine == machine
            ],
        )


def _machine_of(row: Row) -> str:
    # machines differ by their name, not by the number of threads
    return row["hardware"].partition(",")[0]


def origin_of(rows: Sequence[Row]) -> str:
    """Hardware, dates and commits of the figures, as the end of a sentence."""
    commits = sorted({row["commit"] for row in rows})
    days = sorted({row["date"] for row in rows})
    machines = sorted({row["hardware"] for row in rows})
    return (
        f"{', '.join(machines)}; {days[0]}{f' to {days[-1]}' if len(days) > 1 else ''}; commit "
        + (", ".join(commits))
    )

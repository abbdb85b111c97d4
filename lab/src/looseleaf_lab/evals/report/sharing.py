"""Charts of the papers' claims on sharing, documents stored once and first tokens, from
``hits.csv``, ``relay.csv``, ``lazy.csv`` and ``rate.csv``."""

import re
from collections.abc import Iterator, Sequence

from looseleaf_lab.evals.report.charts import Chart
from looseleaf_lab.evals.report.rows import Row, Series, by_machine, group_series, line_series

_CACHES = {
    "once": "stored once",
    "copies": "copy per position",
    "cacheblend": "CacheBlend, as the paper counts",
    "prefix": "prefix caching",
}
_PER_REQUEST = "5"


def hits_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Hit ratios by budget and skew, with the paper's figures as marks; the case of the closed
    form."""
    standard = [r for r in rows if r["lengths"] == "equal" and r["per_request"] == _PER_REQUEST]
    if standard:
        yield _hit_ratios(standard)
    yield from _closed_form([row for row in rows if row["per_request"] != _PER_REQUEST])


def _hit_ratios(standard: Sequence[Row]) -> Chart:
    cells = list(dict.fromkeys((row["alpha"], row["budget_gb"]) for row in standard))
    series, points = [], []
    for cache, name in _CACHES.items():
        cache_rows = [row for row in standard if row["cache"] == cache]
        positions = [float(cells.index((row["alpha"], row["budget_gb"]))) for row in cache_rows]
        series.append(
            Series(name, tuple(positions), tuple(100 * float(row["reused"]) for row in cache_rows))
        )
        published = [
            (x, float(row["paper"]))
            for x, row in zip(positions, cache_rows, strict=True)
            if row["paper"]
        ]
        if published:
            points.append(
                Series(name, tuple(x for x, _ in published), tuple(y for _, y in published))
            )
    groups = tuple(f"α {alpha}, {float(budget):g} GB" for alpha, budget in cells)
    title = "Documents found in the cache (published: another trace, LazyAttention's own)"
    return Chart("hits", title, "hit ratio, %", tuple(series), groups, points=tuple(points))


def _closed_form(rows: Sequence[Row]) -> Iterator[Chart]:
    """Hits of an LRU cache, against a cache of the most popular documents."""
    rows_with_form = [row for row in rows if row["closed_form"]]
    if rows_with_form:
        positions = tuple(float(n) for n in range(len(rows_with_form)))
        series = [
            Series(name, positions, tuple(100 * float(row[column]) for row in rows_with_form))
            for name, column in (("closed form", "closed_form"), ("measured", "reused"))
        ]
        first = rows_with_form[0]
        title = (
            f"{first['per_request']} positions, room for {first['documents_held']} documents, "
            f"α {first['alpha']}"
        )
        groups = tuple(_CACHES.get(row["cache"], row["cache"]) for row in rows_with_form)
        yield Chart("hits_closed_form", title, "hit ratio, %", tuple(series), groups)


def relay_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Per machine: speed-up over private copies, measured and by the paper's model; throughput."""
    for machine, machine_rows in by_machine(rows):
        copies = [
            row for row in machine_rows
            if row["measurement"] == "decode attention" and row["arm"] == "private copies"
        ]  # fmt: skip
        for heads in dict.fromkeys(row["model"] for row in copies):
            heads_rows = [row for row in copies if row["model"] == heads]
            name = f"relay_attention_{machine}_{heads.split()[0].replace('/', '_')}"
            yield _speed_ups(name, heads_rows)
        service = [row for row in machine_rows if row["measurement"] != "decode attention"]
        if service:
            yield _service(f"relay_service_{machine}", service)


def _speed_ups(name: str, copies: Sequence[Row]) -> Chart:
    measured, model = [], []
    for batch in sorted({row["batch"] for row in copies}, key=int):
        batch_rows = sorted(
            (r for r in copies if r["batch"] == batch), key=lambda r: int(r["prefix"])
        )
        x = tuple(float(row["prefix"]) for row in batch_rows)
        faster = tuple(float(row["relay_faster"]) for row in batch_rows)
        rows = f"{batch} rows" if batch != "1" else "1 row"
        measured.append(Series(rows, x, faster))
        predicted = tuple(float(row["predicted"]) for row in batch_rows)
        model.append(Series(f"{rows}, model", x, predicted))
    title = f"Decode attention, {copies[0]['model']}, {copies[0]['hardware']}"
    return Chart(
        name, title, "times faster than private copies", tuple(measured),
        x_label="tokens of shared prefix", points=tuple(model), log_x=True, log_y=True,
    )  # fmt: skip


def _service(name: str, rows: Sequence[Row]) -> Chart:
    # a rate at another latency is an older measurement of the same bar
    newest = {(_line(row), row["prefix"], row["arm"]): row for row in rows}
    series, groups = group_series(
        # by prefix within a line
        sorted(newest.values(), key=lambda row: (_LINES.index(_line(row)), int(row["prefix"]))),
        lambda row: f"{_line(row)}, {row['prefix']}",
        lambda row: float(row["median"]),
    )
    title = f"Requests behind one prefix, {rows[0]['model']}, {rows[0]['hardware']}"
    return Chart(name, title, "requests/s", series, groups)


_LINES = (
    "throughput",
    "1-shot questions",
    "3-shot questions",
    "5-shot questions",
    "at fixed latency",
)


def _line(row: Row) -> str:
    return "at fixed latency" if row["measurement"].startswith("rate") else row["measurement"]


def lazy_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Per machine: first tokens and throughput by skew, and the breakdown by cached documents."""
    for machine, machine_rows in by_machine(rows):
        breakdown_rows = [row for row in machine_rows if row["measurement"].startswith("breakdown")]
        if breakdown_rows:
            yield _breakdown(f"lazy_breakdown_{machine}", breakdown_rows)
        for measurement in ("first token", "throughput"):
            measurement_rows = [row for row in machine_rows if row["measurement"] == measurement]
            if measurement_rows:
                yield _by_skew(
                    f"lazy_{measurement.replace(' ', '_')}_{machine}", measurement, measurement_rows
                )


def _by_skew(name: str, measurement: str, rows: Sequence[Row]) -> Chart:
    series, groups = group_series(
        rows,
        lambda row: "uniform" if float(row["alpha"]) == 0 else f"α {row['alpha']}",
        lambda row: float(row["value"]),
    )
    title = f"{measurement.capitalize()}, {rows[0]['model']}, {rows[0]['hardware']}"
    return Chart(name, title, rows[0]["unit"], series, groups)


def _breakdown(name: str, rows: Sequence[Row]) -> Chart:
    # "breakdown, 3 cached: first token"
    labelled = [row | {"arm": row["measurement"].partition(": ")[2]} for row in rows]
    series, groups = group_series(
        labelled,
        lambda row: row["measurement"].partition(": ")[0].removeprefix("breakdown, "),
        lambda row: float(row["value"]),
    )
    first = rows[0]
    size = f"{first['per_request']} documents of {first['document_tokens']}"
    title = f"{size}, {first['model']}, {first['hardware']}"
    return Chart(name, title, "ms", series, groups, log_y=True)


def rate_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Per machine: first tokens at rising rates, and by number and length of documents."""
    for machine, machine_rows in by_machine(rows):
        label = f"{machine_rows[0]['model']}, {machine_rows[0]['hardware']}"
        rate_rows = _last_run([row for row in machine_rows if row["measurement"] == "first token"])
        if rate_rows:
            yield Chart(
                f"rate_{machine}", f"First tokens, {label}", "ms, mean",
                line_series(rate_rows, "rate", lambda row: float(row["value"])),
                x_label="requests/s", log_x=True, log_y=True,
            )  # fmt: skip
        size_rows = sorted((row for row in machine_rows if _size(row)), key=_size_rank)
        series, groups = group_series(size_rows, _size, lambda row: float(row["value"]))
        if len(groups) > 1:
            title = f"First tokens by documents and their tokens, {label}"
            yield Chart(f"rate_sizes_{machine}", title, "ms, mean", series, groups, log_y=True)


def _last_run(rows: Sequence[Row]) -> list[Row]:
    """The rows of each arm's newest run: earlier runs may end at another rate."""
    newest = {row["arm"]: row["commit"] for row in rows}
    return [row for row in rows if row["commit"] == newest[row["arm"]]]


def _size_rank(row: Row) -> tuple[bool, int, int, int]:
    """Sort key: single requests before batches; few and short documents first."""
    match = re.search(r"(\d+) at once", row["measurement"])
    batch = int(match[1]) if match else 1
    return batch > 1, int(row["document_tokens"]), int(row["per_request"]), batch


def _size(row: Row) -> str:
    """Number and length of documents, for first tokens without a rate, else an empty text."""
    suffix = row["measurement"].removeprefix("first token")
    if suffix != " alone" and not suffix.endswith("at once"):
        return ""
    return f"{row['per_request']} × {row['document_tokens']}" + suffix.removeprefix(" alone")

"""Charts of what the papers claim of sharing, of documents stored once, and of first tokens: of
``hits.csv``, ``relay.csv``, ``lazy.csv`` and ``rate.csv``."""

import re
from collections.abc import Iterator, Sequence

from looseleaf_lab.evals.report.charts import Chart
from looseleaf_lab.evals.report.rows import Row, Series, by_machine, grouped, over

_CACHES = {
    "once": "stored once",
    "copies": "copy per position",
    "cacheblend": "CacheBlend, as the paper counts",
    "prefix": "prefix caching",
}
_PER_REQUEST = "5"


def hits_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Hit ratios by budget and skew, what the paper published as marks; the closed form's case."""
    usual = [r for r in rows if r["lengths"] == "equal" and r["per_request"] == _PER_REQUEST]
    if usual:
        yield _hit_ratios(usual)
    yield from _closed_form([row for row in rows if row["per_request"] != _PER_REQUEST])


def _hit_ratios(usual: Sequence[Row]) -> Chart:
    cells = list(dict.fromkeys((row["alpha"], row["budget_gb"]) for row in usual))
    series, points = [], []
    for cache, name in _CACHES.items():
        own = [row for row in usual if row["cache"] == cache]
        at = [float(cells.index((row["alpha"], row["budget_gb"]))) for row in own]
        series.append(Series(name, tuple(at), tuple(100 * float(row["reused"]) for row in own)))
        known = [(x, float(row["paper"])) for x, row in zip(at, own, strict=True) if row["paper"]]
        if known:
            points.append(Series(name, tuple(x for x, _ in known), tuple(y for _, y in known)))
    groups = tuple(f"α {alpha}, {float(budget):g} GB" for alpha, budget in cells)
    title = "Documents found in the cache (published: another trace, LazyAttention's own)"
    return Chart("hits", title, "hit ratio, %", tuple(series), groups, points=tuple(points))


def _closed_form(rows: Sequence[Row]) -> Iterator[Chart]:
    """Hits of a cache that drops what was not used for longest, beside those of one that holds the
    most popular."""
    known = [row for row in rows if row["closed_form"]]
    if known:
        places = tuple(float(n) for n in range(len(known)))
        series = [
            Series(name, places, tuple(100 * float(row[column]) for row in known))
            for name, column in (("closed form", "closed_form"), ("measured", "reused"))
        ]
        first = known[0]
        title = (
            f"{first['per_request']} positions, room for {first['documents_held']} documents, "
            f"α {first['alpha']}"
        )
        groups = tuple(_CACHES.get(row["cache"], row["cache"]) for row in known)
        yield Chart("hits_closed_form", title, "hit ratio, %", tuple(series), groups)


def relay_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """For each machine: how much faster than private copies, measured and by the paper's model;
    throughput."""
    for machine, own in by_machine(rows):
        copies = [
            row for row in own
            if row["measurement"] == "decode attention" and row["arm"] == "private copies"
        ]  # fmt: skip
        for heads in dict.fromkeys(row["model"] for row in copies):
            chosen = [row for row in copies if row["model"] == heads]
            name = f"relay_attention_{machine}_{heads.split()[0].replace('/', '_')}"
            yield _speed_ups(name, chosen)
        service = [row for row in own if row["measurement"] != "decode attention"]
        if service:
            yield _service(f"relay_service_{machine}", service)


def _speed_ups(name: str, copies: Sequence[Row]) -> Chart:
    measured, model = [], []
    for batch in sorted({row["batch"] for row in copies}, key=int):
        own = sorted((r for r in copies if r["batch"] == batch), key=lambda r: int(r["prefix"]))
        x = tuple(float(row["prefix"]) for row in own)
        faster = tuple(float(row["relay_faster"]) for row in own)
        rows = f"{batch} rows" if batch != "1" else "1 row"
        measured.append(Series(rows, x, faster))
        predicted = tuple(float(row["predicted"]) for row in own)
        model.append(Series(f"{rows}, model", x, predicted))
    title = f"Decode attention, {copies[0]['model']}, {copies[0]['hardware']}"
    return Chart(
        name, title, "times faster than private copies", tuple(measured),
        x_label="tokens of shared prefix", points=tuple(model), log_x=True, log_y=True,
    )  # fmt: skip


def _service(name: str, rows: Sequence[Row]) -> Chart:
    # a rate at another latency is the same bar, measured before
    newest = {(_line(row), row["prefix"], row["arm"]): row for row in rows}
    series, groups = grouped(
        # a line's prefixes, the shortest first
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
    """For each machine: first tokens and throughput by skew, and what is cached costs."""
    for machine, own in by_machine(rows):
        apart = [row for row in own if row["measurement"].startswith("breakdown")]
        if apart:
            yield _breakdown(f"lazy_breakdown_{machine}", apart)
        for what in ("first token", "throughput"):
            chosen = [row for row in own if row["measurement"] == what]
            if chosen:
                yield _by_skew(f"lazy_{what.replace(' ', '_')}_{machine}", what, chosen)


def _by_skew(name: str, what: str, rows: Sequence[Row]) -> Chart:
    series, groups = grouped(
        rows,
        lambda row: "uniform" if float(row["alpha"]) == 0 else f"α {row['alpha']}",
        lambda row: float(row["value"]),
    )
    title = f"{what.capitalize()}, {rows[0]['model']}, {rows[0]['hardware']}"
    return Chart(name, title, rows[0]["unit"], series, groups)


def _breakdown(name: str, rows: Sequence[Row]) -> Chart:
    # "breakdown, 3 cached: first token"
    named = [row | {"arm": row["measurement"].partition(": ")[2]} for row in rows]
    series, groups = grouped(
        named,
        lambda row: row["measurement"].partition(": ")[0].removeprefix("breakdown, "),
        lambda row: float(row["value"]),
    )
    first = rows[0]
    size = f"{first['per_request']} documents of {first['document_tokens']}"
    title = f"{size}, {first['model']}, {first['hardware']}"
    return Chart(name, title, "ms", series, groups, log_y=True)


def rate_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """For each machine: what a first token takes at rising rates, and for how many documents of
    which length."""
    for machine, own in by_machine(rows):
        where = f"{own[0]['model']}, {own[0]['hardware']}"
        arriving = _last_run([row for row in own if row["measurement"] == "first token"])
        if arriving:
            yield Chart(
                f"rate_{machine}", f"First tokens, {where}", "ms, mean",
                over(arriving, "rate", lambda row: float(row["value"])),
                x_label="requests/s", log_x=True, log_y=True,
            )  # fmt: skip
        sized = sorted((row for row in own if _size(row)), key=_size_rank)
        series, groups = grouped(sized, _size, lambda row: float(row["value"]))
        if len(groups) > 1:
            title = f"First tokens by documents and their tokens, {where}"
            yield Chart(f"rate_sizes_{machine}", title, "ms, mean", series, groups, log_y=True)


def _last_run(rows: Sequence[Row]) -> list[Row]:
    """Of each arm what its newest run measured, which ends at another rate than those before."""
    newest = {row["arm"]: row["commit"] for row in rows}
    return [row for row in rows if row["commit"] == newest[row["arm"]]]


def _size_rank(row: Row) -> tuple[bool, int, int, int]:
    """Requests alone before requests at once; few and short documents first."""
    at_once = re.search(r"(\d+) at once", row["measurement"])
    together = int(at_once[1]) if at_once else 1
    return together > 1, int(row["document_tokens"]), int(row["per_request"]), together


def _size(row: Row) -> str:
    """How many documents of how many tokens, for first tokens that no rate is about."""
    what = row["measurement"].removeprefix("first token")
    if what != " alone" and not what.endswith("at once"):
        return ""
    return f"{row['per_request']} × {row['document_tokens']}" + what.removeprefix(" alone")

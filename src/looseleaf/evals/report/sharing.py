"""Charts of ``hits.csv``, ``relay.csv`` and ``lazy.csv``: the papers' claims on sharing."""

from collections.abc import Iterator, Sequence

from looseleaf.evals.report.charts import Chart
from looseleaf.evals.report.rows import Row, Series

_CACHES = {
    "once": "stored once",
    "copies": "copy per position",
    "cacheblend": "CacheBlend, as the paper counts",
    "prefix": "prefix caching",
}
_PER_REQUEST = "5"


def hits_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Hit ratios by budget and skew; what the paper published as marks."""
    usual = [r for r in rows if r["lengths"] == "equal" and r["per_request"] == _PER_REQUEST]
    cells = list(dict.fromkeys((row["alpha"], row["budget_gb"]) for row in usual))
    if not cells:
        return
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
    yield Chart("hits", title, "hit ratio, %", tuple(series), groups, points=tuple(points))


def relay_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """How much faster than private copies, measured and by the paper's model; throughput."""
    copies = [
        row for row in rows
        if row["measurement"] == "decode attention" and row["arm"] == "private copies"
    ]  # fmt: skip
    if copies:
        measured, model = [], []
        for batch in dict.fromkeys(row["batch"] for row in copies):
            own = sorted((r for r in copies if r["batch"] == batch), key=lambda r: int(r["prefix"]))
            x = tuple(float(row["prefix"]) for row in own)
            faster = tuple(float(row["relay_faster"]) for row in own)
            measured.append(Series(f"{batch} rows", x, faster))
            predicted = tuple(float(row["predicted"]) for row in own)
            model.append(Series(f"{batch} rows, model", x, predicted))
        yield Chart(
            "relay_attention", f"Decode attention, {copies[0]['hardware']}",
            "times faster than private copies", tuple(measured), x_label="tokens of shared prefix",
            points=tuple(model), log_x=True, log_y=True,
        )  # fmt: skip
    service = [row for row in rows if row["measurement"] != "decode attention"]
    if service:
        names = list(dict.fromkeys((_line(row), row["prefix"]) for row in service))
        series = []
        for arm in dict.fromkeys(row["arm"] for row in service):
            own = [row for row in service if row["arm"] == arm]
            at = tuple(float(names.index((_line(row), row["prefix"]))) for row in own)
            series.append(Series(arm, at, tuple(float(row["median"]) for row in own)))
        groups = tuple(f"{line}, {prefix}" for line, prefix in names)
        title = f"Requests behind one prefix, {service[0]['model']}, {service[0]['hardware']}"
        yield Chart("relay_service", title, "requests/s", tuple(series), groups)


def _line(row: Row) -> str:
    return "at fixed latency" if row["measurement"].startswith("rate") else row["measurement"]


def lazy_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """First tokens and throughput by skew."""
    for what in ("first token", "throughput"):
        own = [row for row in rows if row["measurement"] == what]
        if not own:
            continue
        skews = list(dict.fromkeys(row["alpha"] for row in own))
        series = []
        for arm in dict.fromkeys(row["arm"] for row in own):
            chosen = [row for row in own if row["arm"] == arm]
            at = tuple(float(skews.index(row["alpha"])) for row in chosen)
            series.append(Series(arm, at, tuple(float(row["value"]) for row in chosen)))
        groups = tuple("uniform" if float(skew) == 0 else f"α {skew}" for skew in skews)
        title = f"{what.capitalize()}, {own[0]['model']}, {own[0]['hardware']}"
        name = f"lazy_{what.replace(' ', '_')}"
        yield Chart(name, title, own[0]["unit"], tuple(series), groups)

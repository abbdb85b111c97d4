"""Charts of what the papers claim of sharing, of documents stored once, and of first tokens: of
``hits.csv``, ``relay.csv``, ``lazy.csv`` and ``rate.csv``."""

from collections.abc import Iterator, Sequence

from looseleaf.evals.report.charts import Chart
from looseleaf.evals.report.rows import Row, Series, by_machine

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
    names = list(dict.fromkeys((line, prefix) for line, prefix, _ in newest))
    series = []
    for arm in dict.fromkeys(arm for *_, arm in newest):
        own = [(names.index(key[:2]), row) for key, row in newest.items() if key[2] == arm]
        at = tuple(float(number) for number, _ in own)
        series.append(Series(arm, at, tuple(float(row["median"]) for _, row in own)))
    groups = tuple(f"{line}, {prefix}" for line, prefix in names)
    title = f"Requests behind one prefix, {rows[0]['model']}, {rows[0]['hardware']}"
    return Chart(name, title, "requests/s", tuple(series), groups)


def _line(row: Row) -> str:
    return "at fixed latency" if row["measurement"].startswith("rate") else row["measurement"]


def lazy_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """For each machine: first tokens and throughput by skew."""
    for machine, own in by_machine(rows):
        for what in ("first token", "throughput"):
            chosen = [row for row in own if row["measurement"] == what]
            if chosen:
                yield _by_skew(f"lazy_{what.replace(' ', '_')}_{machine}", what, chosen)


def _by_skew(name: str, what: str, rows: Sequence[Row]) -> Chart:
    skews = list(dict.fromkeys(row["alpha"] for row in rows))
    series = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        chosen = [row for row in rows if row["arm"] == arm]
        at = tuple(float(skews.index(row["alpha"])) for row in chosen)
        series.append(Series(arm, at, tuple(float(row["value"]) for row in chosen)))
    groups = tuple("uniform" if float(skew) == 0 else f"α {skew}" for skew in skews)
    title = f"{what.capitalize()}, {rows[0]['model']}, {rows[0]['hardware']}"
    return Chart(name, title, rows[0]["unit"], tuple(series), groups)


def rate_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """For each machine: what a first token takes at rising rates."""
    for machine, own in by_machine(rows):
        arriving = [row for row in own if row["measurement"] == "first token"]
        if not arriving:
            continue
        series = []
        for arm in dict.fromkeys(row["arm"] for row in arriving):
            points = sorted(
                (float(r["rate"]), float(r["value"])) for r in arriving if r["arm"] == arm
            )
            series.append(Series(arm, *(tuple(column) for column in zip(*points, strict=True))))
        yield Chart(
            f"rate_{machine}", f"First tokens, {own[0]['model']}, {own[0]['hardware']}", "ms, mean",
            tuple(series), x_label="requests/s", log_x=True, log_y=True,
        )  # fmt: skip

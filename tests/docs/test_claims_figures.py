"""The figures of the page of claims are those of the newest rows in ``results/``: what is measured
again is written again, or this fails."""

import csv
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs" / "claims.md").read_text(encoding="utf-8").split())
H200, CPU = "NVIDIA H200", "AMD EPYC"
PREFIXES, SHARING = (64, 512, 2048), ("once", "copies", "cacheblend", "prefix")
LATENCY = "rate at 1.5 times the latency of one"


@cache
def rows(name: str) -> list[dict[str, str]]:
    with (ROOT / "results" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def cell(name: str, column: str, machine: str = "", **where: object) -> float:
    """A figure of the newest row that says all this."""
    wanted = {key: str(value) for key, value in where.items()}
    found = [
        row[column]
        for row in rows(name)
        if row["hardware"].startswith(machine) and wanted.items() <= row.items()
    ]
    assert found, f"{name}.csv has no row of {where} on {machine or 'any machine'}"
    return float(found[-1])


def hits(budget: float, alpha: float, **where: object) -> str:
    where = {"lengths": "equal", "per_request": 5, "budget_gb": budget, "alpha": alpha, **where}
    found = [100 * cell("hits", "reused", cache=cache, **where) for cache in SHARING]
    return f"| {', '.join(f'{one:.1f}' for one in found)} % |"


def lazy(
    what: str, alpha: float, column: str, machine: str, arm: str = "copies per position"
) -> float:
    return cell("lazy", column, machine, measurement=what, alpha=alpha, arm=arm)


def first_and_later(alpha: float) -> str:
    ours, copies = (
        lazy("first token", alpha, "value", H200, arm) for arm in ("once", "copies per position")
    )
    return f"{copies / ours:.1f} × ({ours:.0f} against {copies:.0f} ms)"


def throughput(alpha: float) -> str:
    ours, copies = (
        lazy("throughput", alpha, "value", H200, arm) for arm in ("once", "copies per position")
    )
    digits = 0 if ours > 10 else 1
    return f"{ours / copies:.1f} × ({ours:.{digits}f} against {copies:.1f}"


def breakdown(machine: str) -> str:
    found = [
        cell("lazy", "value", machine, measurement=f"breakdown, {n} cached: first token")
        for n in ("none", "3", "all")
    ]
    return ", ".join(f"{one:.0f}" for one in found)


def relay(what: str, arm: str, machine: str) -> list[float]:
    return [
        cell("relay", "relay_faster", machine, measurement=what, prefix=prefix, arm=arm)
        for prefix in PREFIXES
    ]


def rate(prefix: int, arm: str) -> float:
    return cell("relay", "median", H200, measurement=LATENCY, prefix=prefix, arm=arm)


def against_shared_pages(prefix: int) -> str:
    ours, shared = rate(prefix, "relay"), rate(prefix, "shared pages")
    return f"{ours:.1f}, **{ours / shared:.2f} ×** ({shared:.1f})"


def operator(batch: int, machine: str, column: str = "relay_faster") -> list[float]:
    where = {"measurement": "decode attention", "arm": "private copies", "batch": batch}
    return [cell("relay", column, machine, prefix=prefix, **where) for prefix in PREFIXES]


def listed(values: list[float], digits: int = 1) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)


def saved(arm: str, machine: str) -> str:
    found = [
        100 / cell("relay", "relay_faster", machine, measurement=f"{n}-shot questions", arm=arm)
        - 100
        for n in (1, 3, 5)
    ]
    # so that nothing is not less than nothing
    return ", ".join(f"{one + 0.0:.0f}".replace("-", "−") for one in map(round, found))


def fuse(documents: int, length: int, place: str, *arms: str, ratio: float = 0.15) -> list[float]:
    where = {"documents": documents, "document_tokens": length, "measurement": "first token"}
    return [
        cell("fuse", "times_full", H200, place=place, arm=arm, ratio=ratio, **where) for arm in arms
    ]


def chains(*arms: str, task: str = "chain") -> list[float]:
    """Exact match over one to three hops, percent."""
    where = {"model": "causal", "task": task, "metric": "exact"}
    return [
        100
        * fmean(
            cell("blend", "value", setting=f"{hops}, 6 documents", arm=arm, **where)
            for hops in ("1 hop", "2 hops", "3 hops")
        )
        for arm in arms
    ]


def tiers() -> str:
    where = {"model": "causal", "arm": "controller"}
    found = [
        1e3 * cell("tiers", "seconds", CPU, tier=tier, **where)
        for tier in ("fast", "medium", "slow", "disk", "remote")
    ]
    return "{:.0f} ms from a fast tier, {:.0f} medium, {:.0f} slow, {:.0f} from disk".format(*found)


def hosted(arm: str, context: int, layers: int = 32) -> float:
    return cell("hosted", "token_ms", H200, arm=arm, context=context, layers=layers)


def roll_call(arm: str, metric: str = "lines") -> float:
    where = {"task": "roll-call", "setting": "40 lines, 50 documents", "metric": metric}
    return cell("roll_call", "value", H200, arm=arm, **where)


def revised(budget: float, *windows: int) -> list[float]:
    return [100 * roll_call(f"quest, ratio {budget:g}, revise {w}") for w in windows]


def token(arm: str, column: str = "ms") -> float:
    return cell("select", column, H200, what="token", context=130560, batch=1, arm=arm)


FRAGMENTS = {
    "hits at 1 GB, α 1.1": lambda: hits(1.0, 1.1),
    "hits at 1 GB, α 2.1": lambda: hits(1.0, 2.1),
    "hits at 10 GB, α 1.5": lambda: hits(10.0, 1.5),
    "hits at 50 GB, α 1.5": lambda: hits(50.0, 1.5),
    "first tokens, α 2.1": lambda: first_and_later(2.1),
    "first tokens, uniform": lambda: first_and_later(0.0),
    "first tokens on a CPU": lambda: f"{lazy('first token', 0.0, 'once_faster', CPU):.2f} ×",
    "throughput": lambda: throughput(2.1),
    "throughput, uniform": lambda: throughput(0.0),
    "what is cached": lambda: f"{breakdown(H200)} ms; a token of output",
    "what is cached, CPU": lambda: f"256 tokens each: {breakdown(CPU)} ms",
    "64 rows": lambda: f"64 rows {listed(operator(64, H200))} × (model "
    + f"{listed(operator(64, H200, 'predicted'))})",
    "32 rows on a CPU": lambda: f"{listed(operator(32, CPU))} ×",
    "throughput behind prefixes": lambda: f"{listed(relay('throughput', 'no sharing', H200))} ×",
    "rate": lambda: "behind 2,048: {:.1f} requests/s".format(rate(2048, "relay")),
    "rate behind 64": lambda: f"behind 64: {against_shared_pages(64)}",
    "rate behind 512": lambda: f"behind 512: {against_shared_pages(512)}",
    "few-shot": lambda: f"{saved('no sharing', H200)} % over copies; "
    + f"**{saved('shared pages', H200)} %** over shared",
    "few-shot on a CPU": lambda: f"{saved('no sharing', CPU)} % over copies, "
    + f"{saved('shared pages', CPU)} % over shared",
    "five long documents": lambda: "in the pool {:.1f} × (random), {:.1f} × (question), "
    "{:.1f} × (deviation), **{:.1f} ×** (links)".format(
        *fuse(5, 4096, "device", "random", "question", "deviation", "links")
    ),
    "five long documents, 5 and 18 %": lambda: "in the pool {:.1f} and {:.1f} × (random), "
    "{:.1f} and {:.1f} × (question), {:.1f} and {:.1f} × (deviation)".format(
        *(
            fuse(5, 4096, "device", arm, ratio=ratio)[0]
            for arm in ("random", "question", "deviation")
            for ratio in (0.05, 0.18)
        )
    ),
    "five long documents from the host": lambda: "memory {:.1f}, {:.1f}, {:.1f}, **1.5 ×**".format(
        *fuse(5, 4096, "host", "random", "question", "deviation")
    ),
    "six short documents": lambda: "512 tokens: {:.1f} × (random), {:.1f} × (question), "
    "{:.1f} × (deviation), **{:.1f} ×** (links); from the host's memory {:.1f}, {:.1f}, {:.1f}, "
    "**{:.1f} ×**".format(
        *fuse(6, 512, "device", "random", "question", "deviation", "links"),
        *fuse(6, 512, "host", "random", "question", "deviation", "links"),
    ),
    "chains": lambda: "full {:.1f}, plain reuse {:.1f}, links {:.1f}, deviation at layer 2 {:.1f}, "
    "**at layer 1, the paper's, {:.1f}**".format(
        *chains("full attention", "documents reused", "links, ratio 0.15", "deviation, ratio 0.15",
                "deviation, ratio 0.15, layers 1")
    ),
    "tiers": tiers,
    "hosted documents": lambda: "graph {:.1f} ms a token, **{:.0f} ×** faster than exact search "
    "({:.0f}), **{:.1f} ×** than ivf".format(
        hosted("graph", 131072), hosted("flat", 131072) / hosted("graph", 131072),
        hosted("flat", 131072), hosted("ivf", 131072) / hosted("graph", 131072)
    ),
    "a million tokens": lambda: "{:.1f} to {:.1f} ms".format(
        hosted("graph", 102400, 8), hosted("graph", 1048576, 8)
    ),
    "revision at 3 %": lambda: "Quest {:.1f}, w = 2 {:.1f}".format(
        100 * roll_call("quest, ratio 0.03"), *revised(0.03, 2)
    ),
    "revision at 5 %": lambda: f"5 %: Quest {100 * roll_call('quest, ratio 0.05'):.1f}, then "
    + listed(revised(0.05, 2, 4, 8)),
    "a token's time": lambda: "dense {:.2f} ms, Quest {:.2f}, w = 2 {:.2f}".format(
        *map(token, ("dense", "select", "w=2"))
    ),
    "traffic": lambda: f"of {token('select', 'mb'):,.0f} MB a token",
}  # fmt: skip
"""What the page says, made of rows."""


@pytest.mark.parametrize("claim", FRAGMENTS)
def test_a_figure_of_the_page_is_that_of_the_newest_row(claim: str) -> None:
    assert FRAGMENTS[claim]() in PAGE

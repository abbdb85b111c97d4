"""Figures of an arm over questions, with paired 95 % intervals, its laws and verdicts."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

LAW_KL = 1e-3
"""Largest divergence of an arm that equals full prefill by law: rounding of other batches."""
_RESAMPLES = 2_000
Figures = Mapping[str, float]


@dataclass(frozen=True)
class DistanceRow:
    """One arm of one model on one file. Intervals are 95 %, over questions, paired with full.

    ``nll`` is the right answer's loss minus full prefill's, nats per token. ``kl`` is the
    divergence at the right answer's tokens, ``kl_answer`` at full prefill's own tokens.
    ``kl_removed`` is the share of plain reuse's ``kl`` that the arm removes. ``agreement`` is the
    share of equal first 12 greedy tokens, ``same_choice`` of equal choices among four answers.
    ``first_token`` is the median in seconds, ``sooner`` the median factor over full prefill.
    ``tokens`` is the mean number of document tokens."""

    model: str
    file: str
    part: str
    arm: str
    device: str
    questions: int
    tokens: float
    recomputed: float
    nll: float
    nll_low: float
    nll_high: float
    kl: float
    kl_low: float
    kl_high: float
    kl_answer: float
    kl_removed: float
    kl_removed_low: float
    kl_removed_high: float
    agreement: float
    f1: float
    f1_low: float
    f1_high: float
    same_choice: float | str
    right_choice: float | str
    first_token: float
    sooner: float
    sooner_low: float
    sooner_high: float


def summarize(
    labels: Mapping[str, str],
    arm: str,
    figures: Sequence[Figures],
    full: Sequence[Figures],
    reuse: Sequence[Figures],
) -> DistanceRow:
    """The row of an arm from its figures, and those of full prefill and plain reuse."""

    def column(name: str, rows: Sequence[Figures] = figures) -> list[float]:
        return [row[name] for row in rows]

    def mean(name: str) -> float:
        return sum(column(name)) / len(figures)

    losses = [a - b for a, b in zip(column("nll"), column("nll", full), strict=True)]
    gains = [a - b for a, b in zip(column("f1"), column("f1", full), strict=True)]
    total, has_choice = sum(column("document_tokens", reuse)), "choice" in figures[0]
    removed = _ratio(column("kl"), column("kl", reuse))
    times = zip(column("first_token", full), column("first_token"), strict=True)
    sooner = [whole / own for whole, own in times]
    values: dict[str, Any] = {
        **labels,
        "arm": arm,
        "questions": len(figures),
        "tokens": total / len(figures),
        "recomputed": sum(column("recomputed")) / max(1.0, total),
        **_with_interval("nll", sum(losses) / len(losses), paired_mean(losses)),
        **_with_interval("kl", mean("kl"), paired_mean(column("kl"))),
        "kl_answer": mean("kl_answer"),
        **_with_interval("kl_removed", 1 - removed[0], (1 - removed[2], 1 - removed[1])),
        "agreement": mean("agrees"),
        **_with_interval("f1", mean("f1"), paired_mean(gains)),
        "same_choice": mean("same_choice") if has_choice else "",
        "right_choice": column("choice").count(0.0) / len(figures) if has_choice else "",
        "first_token": median(column("first_token")),
        **_with_interval("sooner", median(sooner), _median_bounds(sooner)),
    }
    return DistanceRow(**values)


def _with_interval(name: str, value: float, bounds: Sequence[float]) -> dict[str, float]:
    return {name: value, f"{name}_low": bounds[0], f"{name}_high": bounds[1]}


def paired_mean(differences: Sequence[float]) -> tuple[float, float]:
    """Bounds of a mean difference, from questions drawn with replacement."""
    return _resampled(len(differences), lambda drawn: _mean([differences[n] for n in drawn]))


def _ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float]:
    """The ratio of two sums over the same questions, and its bounds."""

    def of(drawn: Sequence[int]) -> float:
        divisor = sum(below[n] for n in drawn)
        return sum(above[n] for n in drawn) / divisor if divisor > 0 else 0.0

    return (of(range(len(above))), *_resampled(len(above), of))


def _median_bounds(values: Sequence[float]) -> tuple[float, float]:
    return _resampled(len(values), lambda drawn: median([values[n] for n in drawn]))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _resampled(size: int, statistic: Callable[[Sequence[int]], float]) -> tuple[float, float]:
    rng = random.Random(size)
    values = sorted(statistic(rng.choices(range(size), k=size)) for _ in range(_RESAMPLES))
    tail = round(0.025 * _RESAMPLES)
    return values[tail], values[-tail - 1]


def law_of(row: DistanceRow, figures: Sequence[Figures]) -> str:
    """The verdict about an arm that equals full prefill by law."""
    worst = max(max(f["kl"], f["kl_answer"]) for f in figures)
    holds = worst <= LAW_KL
    return f"law: {row.arm} equals full prefill: worst KL {worst:.1e}, {_holds(holds)}"


def verdict_of(row: DistanceRow) -> str:
    """The reading of an approximate arm's intervals."""
    if row.nll_low > 0:
        likelihood = "costs likelihood"
    elif row.nll_high < 0:
        likelihood = "gains likelihood"
    else:
        likelihood = "no loss of likelihood shown"
    speed = "sooner" if row.sooner_low > 1 else "not sooner"
    return f"verdict: {row.arm}: {likelihood}; removes {row.kl_removed:.0%} of KL; {speed}"


def _holds(holds: bool) -> str:
    return "holds" if holds else "BROKEN"

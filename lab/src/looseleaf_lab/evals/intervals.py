"""95 % intervals of shares and means, also of paired differences."""

import math
import random
from collections.abc import Sequence

Z = 1.96
_RESAMPLES = 2_000
_MIN_BOOTSTRAP = 8
"""Minimal number of values for a bootstrap: intervals from two values cover the true mean in only
half of the cases."""


def wilson(successes: float, total: int) -> tuple[float, float]:
    """Bounds of a share from ``successes`` out of ``total`` (Wilson, 1927)."""
    if total < 1:
        raise ValueError("an interval needs at least one observation")
    p = successes / total
    center = (p + Z * Z / (2 * total)) / (1 + Z * Z / total)
    margin = Z * math.sqrt(p * (1 - p) / total + Z * Z / (4 * total * total)) / (1 + Z * Z / total)
    # rounding must not exclude an observed share of exactly 0 or 1
    low = max(0.0, center - margin) if successes else 0.0
    return low, min(1.0, center + margin) if successes < total else 1.0


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """Bounds of the mean of ``values``, from resampling with replacement; the draws depend only on
    the number of values."""
    if not values:
        raise ValueError("an interval needs at least one observation")
    rng = random.Random(len(values))
    size = len(values)
    means = sorted(sum(rng.choices(values, k=size)) / size for _ in range(_RESAMPLES))
    tail = round(0.025 * _RESAMPLES)
    return means[tail], means[-tail - 1]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Bounds of the mean of scores: Wilson's for values of 0 and 1, else by bootstrap.

    Each value is one item; lines of one answer are dependent and count as one value. A bootstrap
    underestimates intervals of few values, and of equal ones. Such samples get Wilson's bounds,
    which are at least as wide as bounds of any scores from 0 to 1 with this mean."""
    if all(value in (0.0, 1.0) for value in values):
        return wilson(round(sum(values)), len(values))
    if _is_degenerate(values):
        return wilson(sum(values), len(values))
    return bootstrap(values)


def _is_degenerate(values: Sequence[float]) -> bool:
    return len(values) < _MIN_BOOTSTRAP or len({*values}) == 1


def paired(differences: Sequence[float]) -> tuple[float, float]:
    """Bounds of the mean of differences between two answers to each item.

    Differences of -1, 0 and 1 use Agresti and Min (2005): half an item more in each of the four
    cells, so that an interval never has width 0. Others use a bootstrap, or Wilson's bounds scaled
    to -1 to 1 where `interval` avoids a bootstrap.
    """
    if not differences:
        raise ValueError("an interval needs at least one observation")
    if any(value not in (-1.0, 0.0, 1.0) for value in differences):
        if not _is_degenerate(differences):
            return bootstrap(differences)
        low, high = wilson(
            sum((1 + difference) / 2 for difference in differences), len(differences)
        )
        return 2 * low - 1, 2 * high - 1
    total = len(differences) + 2.0
    gained = differences.count(1.0) + 0.5
    lost = differences.count(-1.0) + 0.5
    mean = (gained - lost) / total
    margin = Z * math.sqrt((gained + lost) / total - mean * mean) / math.sqrt(total)
    return max(-1.0, mean - margin), min(1.0, mean + margin)

"""What a sample leaves open: 95 % intervals of shares and means, also of paired differences."""

import math
import random
from collections.abc import Sequence

Z = 1.96
_RESAMPLES = 2_000
_FEW = 8
"""Of fewer values drawing again finds too little: of two, bounds that hold the truth in half of the
cases."""


def wilson(right: float, total: int) -> tuple[float, float]:
    """Bounds of a share of which ``right`` of ``total`` were seen (Wilson, 1927)."""
    if total < 1:
        raise ValueError("an interval needs at least one observation")
    p = right / total
    center = (p + Z * Z / (2 * total)) / (1 + Z * Z / total)
    margin = Z * math.sqrt(p * (1 - p) / total + Z * Z / (4 * total * total)) / (1 + Z * Z / total)
    # at the ends rounding would leave a share of 0 outside its own bounds
    low = max(0.0, center - margin) if right else 0.0
    return low, min(1.0, center + margin) if right < total else 1.0


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """Bounds of the mean of ``values``, by drawing them again with replacement; always the same
    draws for the same number of values."""
    if not values:
        raise ValueError("an interval needs at least one observation")
    rng = random.Random(len(values))
    size = len(values)
    means = sorted(sum(rng.choices(values, k=size)) / size for _ in range(_RESAMPLES))
    tail = round(0.025 * _RESAMPLES)
    return means[tail], means[-tail - 1]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Bounds of the mean of scores: Wilson's where each is 0 or 1, by bootstrap otherwise.

    Each value is one item; lines of one answer are not independent, so they count as one value.
    Drawing again says too little where there are few, and nothing where all are alike: shares get
    Wilson's bounds there, which are at least as wide as those of any scores from 0 to 1 with this
    mean.
    """
    if all(value in (0.0, 1.0) for value in values):
        return wilson(round(sum(values)), len(values))
    if _says_little(values):
        return wilson(sum(values), len(values))
    return bootstrap(values)


def _says_little(values: Sequence[float]) -> bool:
    return len(values) < _FEW or len({*values}) == 1


def paired(differences: Sequence[float]) -> tuple[float, float]:
    """Bounds of the mean of differences between two answers to each item.

    Where every difference is -1, 0 or 1, by Agresti and Min (2005), half an item added to each of
    the four cells, so that no difference seen is not taken for none there is; else by bootstrap, or
    where `interval` would not do that, by Wilson's bounds, from -1 to 1.
    """
    if not differences:
        raise ValueError("an interval needs at least one observation")
    if any(value not in (-1.0, 0.0, 1.0) for value in differences):
        if not _says_little(differences):
            return bootstrap(differences)
        low, high = wilson(sum((1 + one) / 2 for one in differences), len(differences))
        return 2 * low - 1, 2 * high - 1
    total = len(differences) + 2.0
    gained = differences.count(1.0) + 0.5
    lost = differences.count(-1.0) + 0.5
    mean = (gained - lost) / total
    margin = Z * math.sqrt((gained + lost) / total - mean * mean) / math.sqrt(total)
    return max(-1.0, mean - margin), min(1.0, mean + margin)

"""Arithmetic of a `Fuse` option's budget: multiplied, raised to a share, and counted in tokens."""

import math
from collections.abc import Sequence
from dataclasses import replace

from looseleaf.blend.budget import Budget
from looseleaf.config import Fuse


def multiplied(fuse: Fuse, factor: float) -> Fuse:
    """``fuse`` with its ratio (at most 1), tokens or seconds times ``factor``."""
    if fuse.ratio is not None:
        return replace(fuse, ratio=min(1.0, fuse.ratio * factor))
    if fuse.tokens is not None:
        return replace(fuse, tokens=math.ceil(fuse.tokens * factor))
    return fuse if fuse.seconds is None else replace(fuse, seconds=fuse.seconds * factor)


def raised(fuse: Fuse, share: float, lengths: Sequence[int]) -> Fuse:
    """``fuse`` with a budget of ``share`` of documents of these lengths, at least its own."""
    if fuse.ratio is not None:
        return replace(fuse, ratio=max(fuse.ratio, share))
    least, target = fuse.tokens or 0, share * sum(lengths)
    if fuse.selector != "first":
        return replace(fuse, tokens=max(least, int(target)))
    # a document shorter than the budget contributes its length
    low, high = least, max([least, *lengths])
    while low < high:
        middle = (low + high + 1) // 2
        enough = sum(min(middle, n) for n in lengths) <= target
        low, high = (middle, high) if enough else (low, middle - 1)
    return replace(fuse, tokens=low)


def again(fuse: Fuse, lengths: Sequence[int]) -> int:
    """The most tokens of documents of these lengths that a policy computes again."""
    if fuse.ratio is not None:
        return Budget(ratio=fuse.ratio).count(sum(lengths))
    tokens = fuse.tokens or 0
    if fuse.selector == "first":
        return sum(min(tokens, n) for n in lengths)
    return min(tokens, sum(lengths))

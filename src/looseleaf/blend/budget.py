"""The budget of a selector, and the top-k that all selectors share."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.blend.candidates import Candidates
from looseleaf.errors import InvalidOption


@dataclass(frozen=True)
class Budget:
    """Exactly one of three limits, for each request.

    ``ratio``: a share of the request's candidates, 0 to 1, rounded down. ``tokens``: a number.
    ``threshold``: all candidates with a higher score. Their number is known only on the device, so
    a threshold costs a synchronisation and fits no fixed graph."""

    ratio: float | None = None
    tokens: int | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        limits = (self.ratio, self.tokens, self.threshold)
        if sum(limit is not None for limit in limits) != 1:
            raise InvalidOption("a budget is a ratio, a number of tokens or a threshold: give one")
        if self.ratio is not None and not 0 <= self.ratio <= 1:
            raise InvalidOption(f"a ratio is between 0 and 1, not {self.ratio}")
        if self.tokens is not None and self.tokens < 0:
            raise InvalidOption(f"a number of tokens is 0 or more, not {self.tokens}")

    @property
    def is_fixed(self) -> bool:
        """Whether the number of tokens follows from the number of candidates alone."""
        return self.threshold is None

    def count(self, length: int) -> int:
        """The most tokens chosen among ``length``; all of them for a threshold."""
        if self.ratio is not None:
            # 0.29 * 100 is 28.999…, which must count as 29
            return min(length, int(self.ratio * length + 1e-9))
        return length if self.tokens is None else min(length, self.tokens)

    def scaled(self, factor: float) -> "Budget":
        """The budget of a layer: ratio or tokens times ``factor``; a threshold does not change."""
        if self.ratio is not None:
            return Budget(ratio=min(1.0, self.ratio * factor))
        return self if self.tokens is None else Budget(tokens=int(self.tokens * factor))


def choose(
    scores: Float[Tensor, " tokens"], candidates: Candidates, budget: Budget
) -> Int[Tensor, " kept"]:
    """Indices of the candidates with the highest scores of each request, ascending.

    The earlier of two tokens with equal scores wins. The host knows the sizes from
    ``budget.count``, unless the budget is a threshold."""
    if budget.threshold is not None:
        return (scores > budget.threshold).nonzero()[:, 0]
    return choose_counts(scores, candidates, budget_counts(candidates, budget))


def budget_counts(candidates: Candidates, budget: Budget) -> tuple[int, ...]:
    """Tokens that ``budget`` allows each request, from its total, at most its candidates."""
    pairs = zip(candidates.lengths, candidates.totals, strict=True)
    return tuple(min(length, budget.count(total)) for length, total in pairs)


def choose_counts(
    scores: Float[Tensor, " tokens"], candidates: Candidates, counts: Sequence[int]
) -> Int[Tensor, " kept"]:
    """``choose`` with a number of tokens for each request, at most its candidates."""
    if len(counts) == 1:
        # the usual case; NumPy takes less time than PyTorch takes to start its threads
        return torch.from_numpy(_highest(scores.cpu().numpy(), counts[0])).to(scores.device)
    # PyTorch sorts NaN as the highest value
    best_first = scores.where(~scores.isnan(), -torch.inf).argsort(descending=True, stable=True)
    # a stable second sort groups by request and keeps the order within each
    by_request = best_first[candidates.requests[best_first].argsort(stable=True)]
    slots = ranges(candidates.starts, counts, scores.device)
    return by_request[slots].sort().values


def _highest(scores: npt.NDArray[np.floating[Any]], count: int) -> npt.NDArray[np.intp]:
    """Ascending indices of the ``count`` highest scores. Earlier scores win ties; NaN is lowest."""
    if not count:
        return np.zeros(0, dtype=np.intp)
    scores = np.where(np.isnan(scores), -np.inf, scores)
    least = np.partition(scores, len(scores) - count)[len(scores) - count]
    chosen = scores > least
    ties = np.flatnonzero(scores == least)
    chosen[ties[: count - int(chosen.sum())]] = True
    return np.flatnonzero(chosen)


def ranges(
    starts: Sequence[int], counts: Sequence[int], device: torch.device
) -> Int[Tensor, " total"]:
    """``starts[i], …, starts[i] + counts[i] - 1`` for each ``i``; the sizes stay on the host."""
    ends = list(accumulate(counts))
    shift = [start - (end - count) for start, end, count in zip(starts, ends, counts, strict=True)]
    total = ends[-1] if ends else 0
    shifts = torch.tensor(shift, dtype=torch.long, device=device)
    repeats = torch.tensor(list(counts), dtype=torch.long, device=device)
    along = torch.arange(total, device=device)
    return along + shifts.repeat_interleave(repeats, output_size=total)

"""How many tokens may be chosen, and choosing that many: the one top-k that all selectors share."""

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
    """Exactly one of three limits, for each request by itself.

    ``ratio``: a share of the request's candidates, 0 to 1, rounded down. ``tokens``: a number.
    ``threshold``: every candidate whose score is above it; how many these are is known only on the
    device, so it costs a synchronisation and fits no fixed graph."""

    ratio: float | None = None
    tokens: int | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        given = [x is not None for x in (self.ratio, self.tokens, self.threshold)]
        if sum(given) != 1:
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
        """Tokens that may be chosen among ``length``. For a threshold, all might."""
        if self.ratio is not None:
            # 0.29 * 100 is 28.999…: what is a whole number but for rounding counts as one
            return min(length, int(self.ratio * length + 1e-9))
        return length if self.tokens is None else min(length, self.tokens)

    def scaled(self, factor: float) -> "Budget":
        """The ratio or number times ``factor``, as a layer's own share; a threshold stays."""
        if self.ratio is not None:
            return Budget(ratio=min(1.0, self.ratio * factor))
        return self if self.tokens is None else Budget(tokens=int(self.tokens * factor))


def choose(
    scores: Float[Tensor, " tokens"], candidates: Candidates, budget: Budget
) -> Int[Tensor, " kept"]:
    """Indices of the candidates with the highest scores of each request, ascending.

    Of equal scores the earlier token wins. Sizes are those of ``budget.count``, known to the host,
    unless the budget is a threshold."""
    if budget.threshold is not None:
        return (scores > budget.threshold).nonzero()[:, 0]
    return choose_counts(scores, candidates, budget_counts(candidates, budget))


def budget_counts(candidates: Candidates, budget: Budget) -> tuple[int, ...]:
    """Tokens that ``budget`` allows each request: of its totals, but no more than are left."""
    pairs = zip(candidates.lengths, candidates.totals, strict=True)
    return tuple(min(left, budget.count(total)) for left, total in pairs)


def choose_counts(
    scores: Float[Tensor, " tokens"], candidates: Candidates, counts: Sequence[int]
) -> Int[Tensor, " kept"]:
    """``choose`` with a number of tokens for each request, at most its candidates."""
    if len(counts) == 1:
        # most often: on a GPU machine's many threads PyTorch's steps take longer to begin than this
        return torch.from_numpy(_highest(scores.cpu().numpy(), counts[0])).to(scores.device)
    # to PyTorch what is no number is the highest
    best_first = scores.where(~scores.isnan(), -torch.inf).argsort(descending=True, stable=True)
    # a stable second sort brings the requests together and keeps the order within each
    by_request = best_first[candidates.requests[best_first].argsort(stable=True)]
    slots = ranges(candidates.starts, counts, scores.device)
    return by_request[slots].sort().values


def _highest(scores: npt.NDArray[np.floating[Any]], count: int) -> npt.NDArray[np.intp]:
    """Where the ``count`` highest scores stand, ascending; of equal ones the earlier win, and what
    is no number is the lowest. Without sorting all: that takes a millisecond for 20,000."""
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

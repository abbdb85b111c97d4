"""Gradual filtering: a ``LayerHook`` that drops rows of a pass at each check layer."""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.blend.budget import budget_counts
from looseleaf.blend.candidates import Candidates
from looseleaf.blend.selectors.base import Selector

RowScores = Callable[[int, Tensor, Tensor], Tensor]
"""Scores ``[rows]`` of candidate rows before a layer, from the layer's index, their hidden states
``[rows, hidden_size]`` and their row numbers in the pass. The scores are `kv_deviation` of the
layer's keys and values."""


class RowFilter:
    """A ``LayerHook`` for one pass over the rows of a batch.

    ``candidate_rows`` are the ascending rows of the candidates in the pass. All other rows are
    text, which is never dropped. ``rows`` are the rows of the pass that the next layer computes. A
    dropped candidate keeps its stored keys and values from that layer on."""

    def __init__(
        self,
        selector: Selector,
        candidates: Candidates,
        candidate_rows: Int[Tensor, " tokens"],
        num_rows: int,
        score_rows: RowScores,
    ) -> None:
        self._selector = selector
        self._score_rows = score_rows
        self._candidate_rows = candidate_rows
        self.candidates = candidates
        self.rows = torch.arange(num_rows, device=candidate_rows.device)
        is_other = torch.ones_like(self.rows, dtype=torch.bool)
        is_other[candidate_rows] = False
        self._other_rows = is_other.nonzero()[:, 0]

    def __call__(
        self, layer: int, hidden: Float[Tensor, "rows hidden_size"]
    ) -> Float[Tensor, "remaining hidden_size"]:
        """The hidden states of the remaining rows; updates ``rows`` and ``candidates``."""
        if layer not in self._selector.check_layers:
            return hidden
        indices = _indices(self.rows, self._candidate_rows)
        scores = self._score_rows(layer, _gather(hidden, indices), self._candidate_rows)
        selector = self._selector.at(layer)
        kept = selector.select(self.candidates, scores)
        self.candidates = self.candidates.among(kept, self._counts(kept, selector))
        self._candidate_rows = self._candidate_rows[kept]
        before = self.rows
        self.rows = torch.cat((self._candidate_rows, self._other_rows)).sort().values
        return _gather(hidden, _indices(before, self.rows))

    def candidate_states(
        self, hidden: Float[Tensor, "remaining hidden_size"]
    ) -> Float[Tensor, "tokens hidden_size"]:
        """The hidden states of the candidates among the remaining rows."""
        return _gather(hidden, _indices(self.rows, self._candidate_rows))

    def _counts(self, kept: Int[Tensor, " kept"], selector: Selector) -> tuple[int, ...]:
        if selector.budget.is_fixed:
            return budget_counts(self.candidates, selector.budget)
        requests = self.candidates.requests[kept]
        return tuple(requests.bincount(minlength=len(self.candidates.lengths)).tolist())


def _gather(
    hidden: Float[Tensor, "rows hidden_size"], indices: Int[Tensor, " subset"]
) -> Float[Tensor, "subset hidden_size"]:
    """The hidden states at ascending ``indices``."""
    if len(indices) == len(hidden):
        return hidden
    if hidden.is_cuda and not indices.is_cuda:
        # a pinned copy does not wait for work in flight
        indices = indices.pin_memory().to(hidden.device, non_blocking=True)
    return hidden[indices]


def _indices(rows: Int[Tensor, " rows"], subset: Int[Tensor, " subset"]) -> Int[Tensor, " subset"]:
    """The index of each row of ``subset`` among the ascending ``rows``."""
    if rows.is_cuda:
        return torch.searchsorted(rows, subset)
    # NumPy takes less time than PyTorch takes to start its threads
    return torch.from_numpy(np.searchsorted(rows.numpy(), subset.numpy()))

"""Narrowing the rows of one pass between layers: gradual filtering as a ``LayerHook``."""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.blend.budget import budget_counts
from looseleaf.blend.candidates import Candidates
from looseleaf.blend.selectors.deviation import Deviation

RowScores = Callable[[int, Tensor, Tensor], Tensor]
"""The scores of some rows before a layer: its index, their hidden states ``[rows, hidden_size]``
and which rows of the pass they are; returns ``[rows]``. For deviation, the engine projects keys and
values of the layer and compares them with the stored ones by ``kv_deviation``."""


class RowFilter:
    """A ``LayerHook`` for one pass over the rows of a batch, made anew for each pass.

    ``candidate_rows`` says which rows of the pass the candidates are, ascending; all other rows are
    texts and holes, which are never left out. ``rows`` are the rows of the pass that the coming
    layer computes: the attention object reads it to know where its rows stand. A candidate left
    out at a layer keeps its stored keys and values from that layer on."""

    def __init__(
        self,
        selector: Deviation,
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
        """The hidden states of the rows that are left; ``rows`` and ``candidates`` follow."""
        if layer not in self._selector.check_layers:
            return hidden
        places = _find(self.rows, self._candidate_rows)
        scores = self._score_rows(layer, _taken(hidden, places), self._candidate_rows)
        selector = self._selector.at(layer)
        kept = selector.select(self.candidates, scores)
        self.candidates = self.candidates.among(kept, self._counts(kept, selector))
        self._candidate_rows = self._candidate_rows[kept]
        before = self.rows
        self.rows = torch.cat((self._candidate_rows, self._other_rows)).sort().values
        return _taken(hidden, _find(before, self.rows))

    def candidate_states(
        self, hidden: Float[Tensor, "remaining hidden_size"]
    ) -> Float[Tensor, "tokens hidden_size"]:
        """Those of the candidates among the hidden states of the rows that are left."""
        return _taken(hidden, _find(self.rows, self._candidate_rows))

    def _counts(self, kept: Int[Tensor, " kept"], selector: Deviation) -> tuple[int, ...]:
        if selector.budget.is_fixed:
            return budget_counts(self.candidates, selector.budget)
        requests = self.candidates.requests[kept]
        return tuple(requests.bincount(minlength=len(self.candidates.lengths)).tolist())


def _taken(
    hidden: Float[Tensor, "rows hidden_size"], places: Int[Tensor, " some"]
) -> Float[Tensor, "some hidden_size"]:
    """The hidden states at ``places``, which rise."""
    if len(places) == len(hidden):
        return hidden
    if hidden.is_cuda and not places.is_cuda:
        # without waiting for what the device still has to do
        places = places.pin_memory().to(hidden.device, non_blocking=True)
    return hidden[places]


def _find(rising: Int[Tensor, " all"], some: Int[Tensor, " some"]) -> Int[Tensor, " some"]:
    """Where ``some`` of ``rising`` numbers stand among them."""
    if rising.is_cuda:
        return torch.searchsorted(rising, some)
    # many threads of PyTorch's take longer to begin than this takes
    return torch.from_numpy(np.searchsorted(rising.numpy(), some.numpy()))

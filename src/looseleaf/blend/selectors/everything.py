"""Full recompute: all candidates, which equals a full prefill."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.blend.candidates import Candidates, Evidence


@dataclass(frozen=True)
class Everything:
    """Chooses every candidate."""

    @property
    def evidence(self) -> Evidence:
        return "none"

    def count(self, lengths: Sequence[int]) -> int:
        """The number of chosen tokens for documents of these lengths."""
        return sum(lengths)

    def select(
        self, candidates: Candidates, scores: Float[Tensor, " tokens"]
    ) -> Int[Tensor, " kept"]:
        return torch.arange(len(candidates), device=candidates.positions.device)

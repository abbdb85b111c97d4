"""Full recompute: the same as a full prefill, for comparison and as a last resort."""

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
        """How many tokens of a request's documents of these lengths are chosen."""
        return sum(lengths)

    def select(
        self, candidates: Candidates, scores: Float[Tensor, " tokens"]
    ) -> Int[Tensor, " kept"]:
        return torch.arange(len(candidates), device=candidates.positions.device)

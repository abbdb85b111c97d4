"""Full reuse: no token is computed again (Prompt Cache, TurboRAG, Block-Attention at inference)."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.blend.candidates import Candidates, Evidence


@dataclass(frozen=True)
class Nothing:
    """Chooses nothing."""

    @property
    def evidence(self) -> Evidence:
        return "none"

    def select(
        self, candidates: Candidates, scores: Float[Tensor, " tokens"]
    ) -> Int[Tensor, " kept"]:
        return candidates.positions.new_empty(0)

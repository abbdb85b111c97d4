"""The oracle: true deviation of each stored token, summed over all layers of a full prefill.

It is for evaluation only, because blending exists to avoid the full prefill."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.blend.budget import Budget, choose
from looseleaf.blend.candidates import Candidates, Evidence


@dataclass(frozen=True)
class Oracle:
    """Chooses the tokens with the highest true deviation."""

    budget: Budget

    @property
    def evidence(self) -> Evidence:
        return "oracle"

    def select(
        self, candidates: Candidates, scores: Float[Tensor, " tokens"]
    ) -> Int[Tensor, " kept"]:
        return choose(scores, candidates, self.budget)

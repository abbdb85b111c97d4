"""What a full prefill knows: how far each stored token is from the truth, over all layers.

For evaluation only, since it needs the full prefill that blending is there to avoid."""

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

"""TOVA (arXiv 2401.06104): what the newest token attends to least goes.

One choice for all heads of a layer, by the mean of their attention. The paper throws away a token a
step; here a page of tokens goes at once, by the attention of the token that fills it."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.sparse.evicting import best


@dataclass(frozen=True)
class Tova:
    """Keeps ``capacity`` keys, the newest among them."""

    capacity: int

    @property
    def only_prompt(self) -> bool:
        """What is generated goes too."""
        return False

    def rows(self, count: int, ends_prompt: bool) -> int:
        """The newest."""
        return 1

    def scores(
        self,
        before: Float[Tensor, "kv_heads keys"],
        weights: Float[Tensor, "rows kv_heads group keys"],
    ) -> Float[Tensor, "kv_heads keys"]:
        """The mean over all heads; what was before does not count."""
        return weights.mean((0, 1, 2)).expand_as(before)

    def keep(self, scores: Float[Tensor, "kv_heads keys"]) -> Int[Tensor, "kv_heads kept"]:
        """The best, and the newest."""
        return best(scores, self.capacity, 1)

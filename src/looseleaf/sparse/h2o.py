"""H2O (arXiv 2306.14048): the keys that have been attended to most, and the newest, half each.

Attention adds up over all tokens so far. The paper throws away a token a step; here a page of
tokens goes at once. The heads of a group share keys, so theirs is the mean."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.sparse.evicting import best


@dataclass(frozen=True)
class H2O:
    """Keeps ``capacity`` keys, half of them the newest."""

    capacity: int

    @property
    def only_prompt(self) -> bool:
        """What is generated goes too."""
        return False

    def rows(self, count: int, ends_prompt: bool) -> int:
        """All."""
        return count

    def scores(
        self,
        before: Float[Tensor, "kv_heads keys"],
        weights: Float[Tensor, "rows kv_heads group keys"],
    ) -> Float[Tensor, "kv_heads keys"]:
        """The sum of attention so far."""
        return before + weights.mean(2).sum(0)

    def keep(self, scores: Float[Tensor, "kv_heads keys"]) -> Int[Tensor, "kv_heads kept"]:
        """The best, and the newest half."""
        return best(scores, self.capacity, max(1, self.capacity // 2))

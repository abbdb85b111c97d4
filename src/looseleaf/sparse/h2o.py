"""H2O (arXiv 2306.14048): keeps the keys with the most attention, and the newest, half each.

Attention adds up over all tokens so far. The paper evicts one token a step, this code a page of
tokens at a time. The heads of a group share keys, so their attention is averaged."""

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
        """False: generated tokens are evicted too."""
        return False

    def rows(self, count: int, ends_prompt: bool) -> int:
        """All rows."""
        return count

    def scores(
        self,
        before: Float[Tensor, "kv_heads keys"],
        weights: Float[Tensor, "rows kv_heads group keys"],
    ) -> Float[Tensor, "kv_heads keys"]:
        """The sum of attention so far."""
        return before + weights.mean(2).sum(0)

    def keep(self, scores: Float[Tensor, "kv_heads keys"]) -> Int[Tensor, "kv_heads kept"]:
        """The best keys, and the newest half."""
        return best(scores, self.capacity, max(1, self.capacity // 2))

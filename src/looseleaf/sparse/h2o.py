"""H2O (arXiv 2306.14048): keeps the keys with the most attention, and the newest, half each.

Attention adds up over all tokens so far. The paper evicts one token a step, this code a page of
tokens at a time. The heads of a group share keys, so their attention is averaged."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.sparse.evicting import Evictor, best


@dataclass(frozen=True)
class H2O(Evictor):
    """Keeps ``capacity`` keys, half of them the newest."""

    def rows(self, count: int, ends_prompt: bool) -> int:
        """All rows."""
        return count

    def keep(self, scores: Float[Tensor, "kv_heads keys"]) -> Int[Tensor, "kv_heads kept"]:
        """The best keys, and the newest half."""
        return best(scores, self.capacity, max(1, self.capacity // 2))

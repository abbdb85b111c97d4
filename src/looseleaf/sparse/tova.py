"""TOVA (arXiv 2401.06104): evicts the keys that the newest token attends to least.

All heads of a layer evict the same keys, by their mean attention. The paper evicts one token a
step, this code a page of tokens at a time, by the attention of the token that fills the page."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.sparse.evicting import Evictor, best


@dataclass(frozen=True)
class Tova(Evictor):
    """Keeps ``capacity`` keys, the newest among them."""

    def rows(self, count: int, ends_prompt: bool) -> int:
        """The newest row."""
        return 1

    def scores(
        self,
        before: Float[Tensor, "kv_heads keys"],
        weights: Float[Tensor, "rows kv_heads group keys"],
    ) -> Float[Tensor, "kv_heads keys"]:
        """The mean over all heads; earlier scores do not count."""
        return weights.mean((0, 1, 2)).expand_as(before)

    def keep(self, scores: Float[Tensor, "kv_heads keys"]) -> Int[Tensor, "kv_heads kept"]:
        """The best keys, and the newest."""
        return best(scores, self.capacity, 1)

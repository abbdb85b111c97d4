"""The eviction policies, by name.

SnapKV (arXiv 2404.14469) keeps the prompt keys that the prompt's last tokens attend to, smoothed
over neighbours. H2O (arXiv 2306.14048) keeps the keys with the most attention over all tokens so
far, and the newest, half each. TOVA (arXiv 2401.06104) evicts the keys that the newest token
attends to least, the same ones for all heads of a layer.

The heads of a group share keys, so their attention is averaged; SnapKV's paper keeps keys per query
head. The papers of H2O and TOVA evict one token a step, this code a page of tokens at a time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.config import Select, share_of
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


@dataclass(frozen=True)
class SnapKV(Evictor):
    """Keeps ``capacity`` keys of a prompt, including those of the last ``observed`` tokens."""

    only_prompt: ClassVar[bool] = True
    observed: int = 32
    pool: int = 5

    def rows(self, count: int, ends_prompt: bool) -> int:
        """The last rows of the prompt."""
        return min(count, self.observed) if ends_prompt else 0

    def keep(self, scores: Float[Tensor, "kv_heads keys"]) -> Int[Tensor, "kv_heads kept"]:
        """The best keys after smoothing, and the observed rows' own."""
        smooth = torch.nn.functional.avg_pool1d(
            scores[None], self.pool, stride=1, padding=self.pool // 2, count_include_pad=False
        )[0]
        return best(smooth, self.capacity, min(self.observed, self.capacity))


_EVICTORS: Mapping[str, Callable[[int], Evictor]] = MappingProxyType(
    {"snapkv": SnapKV, "tova": Tova, "h2o": H2O}
)


def make_evictor(select: Select | None, num_tokens: int) -> Evictor | None:
    """The eviction policy that ``select`` names, for a prompt of ``num_tokens`` tokens; None if it
    evicts nothing."""
    if select is None or select.policy not in _EVICTORS:
        return None
    kept = select.tokens
    if kept is None:
        assert select.ratio is not None, "a capacity is a number of tokens or a share"
        kept = share_of(select.ratio, num_tokens)
    return _EVICTORS[select.policy](kept)

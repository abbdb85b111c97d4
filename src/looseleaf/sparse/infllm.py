"""Scores from a page's representative keys: InfLLM's block rule (arXiv 2402.04617), with other
representatives.

InfLLM represents a block by the keys that later local queries attended to most. A reusable segment
stores no queries, so the representatives are the keys farthest from their page's mean, which a mean
of all keys would hide. The score is the mean over them."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.attention.select.policy import Candidates
from looseleaf.kv.summaries import Summary
from looseleaf.sparse.policy import Scorer
from looseleaf.sparse.quest import vector_scores

_NUM_REPRESENTATIVES = 4


def mean_representative(
    k_pages: Float[Tensor, "layers pages kv_heads page_size head_dim"],
    num_keys: Int[Tensor, " pages"],
) -> Float[Tensor, "layers pages kv_heads head_dim"]:
    """The mean of the (at most four) keys of a page that are farthest from the page's mean.

    A query's product with it is the mean of its products with the representatives."""
    keys = k_pages.float()
    slots = torch.arange(keys.shape[3], device=keys.device)
    used = (slots < num_keys[:, None])[:, None, :, None]  # [pages, 1, page_size, 1]
    count = num_keys[:, None, None, None]
    mean = (keys * used).sum(3, keepdim=True) / count
    distance = (keys - mean).square().sum(-1).masked_fill(~used[..., 0], -1.0)
    few = min(_NUM_REPRESENTATIVES, keys.shape[3])
    farthest = distance.topk(few, -1)
    taken = farthest.values >= 0
    chosen = keys.gather(
        3, farthest.indices[..., None].expand(*farthest.indices.shape, keys.shape[4])
    )
    total = (chosen * taken[..., None]).sum(3)
    return (total / taken.sum(-1, keepdim=True)).to(k_pages.dtype)


REPRESENTATIVES = Summary("representatives", 1, mean_representative)


@dataclass(frozen=True)
class Representatives(Scorer):
    """Scores a page by the mean score of its representative keys."""

    @property
    def summary(self) -> Summary | None:
        """The mean of the representative keys."""
        return REPRESENTATIVES

    def scores(
        self, layer: int, q: Float[Tensor, "rows qo_heads head_dim"], candidates: Candidates
    ) -> Float[Tensor, "rows kv_heads group most"]:
        """The mean of the representatives' scores."""
        return vector_scores(layer, candidates.rotated(layer, q), candidates)

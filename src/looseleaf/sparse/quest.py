"""Quest (arXiv 2406.10774): an upper bound of the scores of a page's keys, from their bounds.

Every page stores the least and the largest value of its keys, dim by dim. The paper's kernels have
one KV head per query head; here the heads of a group choose the pages of their KV head together."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.attention.select.policy import Candidates
from looseleaf.kv.summaries import Summary
from looseleaf.ops.page_bounds import page_bounds
from looseleaf.sparse.policy import Scorer

BOUNDS = Summary("bounds", 2, page_bounds)


@dataclass(frozen=True)
class Quest(Scorer):
    """Scores a page by the bounds of its keys."""

    @property
    def summary(self) -> Summary | None:
        return BOUNDS

    def scores(
        self, layer: int, q: Float[Tensor, "rows qo_heads head_dim"], candidates: Candidates
    ) -> Float[Tensor, "rows kv_heads group most"]:
        """``max(q, 0) . largest + min(q, 0) . least``, scaled; no key of the page scores more."""
        rotated = candidates.rotated(layer, q)
        queries = torch.cat([rotated.clamp_min(0), rotated.clamp_max(0)], -1)
        return vector_scores(layer, queries, candidates)


def vector_scores(
    layer: int,
    queries: Float[Tensor, "spans qo_heads width"],
    candidates: Candidates,
) -> Float[Tensor, "rows kv_heads group most"]:
    """The products of rotated queries with the one summary vector of every page."""
    summaries, table = candidates.summaries, candidates.table
    assert summaries is not None, "the policy has a summary"
    vectors = summaries.layer(layer)[table.pages].float()  # [rows, most, kv_heads, width]
    grouped = queries.unflatten(1, (candidates.num_kv_heads, -1))
    scale = candidates.rules[layer].softmax_scale
    if table.most_spans == 1:
        # [rows, kv_heads, group, width] x [rows, kv_heads, width, most]
        products: Tensor = grouped @ vectors.permute(0, 2, 3, 1)
        return products.mul_(scale)
    by_page = grouped[table.spans].transpose(1, 2)  # [rows, kv_heads, most, group, width]
    # [rows, kv_heads, most, group, 1]
    scores: Tensor = by_page @ vectors.transpose(1, 2)[..., None]
    return scores[..., 0].transpose(2, 3) * scale

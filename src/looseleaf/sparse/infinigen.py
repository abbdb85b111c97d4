"""Scores from a few dims of every key, after InfiniGen (arXiv 2406.19707).

InfiniGen skews the model's weights, fixes the columns when it reads the prompt, and predicts the
next layer. This scorer fixes nothing: it uses the dims in which the row's own query is largest, in
the span's frame, summed over the heads of the group, for the row's own layer. Keys are read in
these dims only; pages have no summary."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.attention.select.policy import Candidates
from looseleaf.sparse.policy import Scorer


@dataclass(frozen=True)
class Partial(Scorer):
    """Scores a page by its best key in a quarter of the dims."""

    def looked(self, page_size: int, head_dim: int) -> int:
        """A quarter of the dims of every key."""
        return page_size * self._num_dims(head_dim)

    def scores(
        self, layer: int, q: Float[Tensor, "rows qo_heads head_dim"], candidates: Candidates
    ) -> Float[Tensor, "rows kv_heads group most"]:
        """The largest partial product of any key of the page, scaled."""
        pool, table, heads = candidates.pool, candidates.table, candidates.num_kv_heads
        rotated = candidates.rotated(layer, q)
        rotated = rotated.unflatten(1, (heads, -1))  # [spans, kv_heads, group, dims]
        num_dims = self._num_dims(rotated.shape[-1])
        dims = rotated.abs().sum(2).topk(num_dims, -1).indices  # [spans, kv_heads, few]
        few = rotated.gather(3, dims[:, :, None].expand(-1, -1, rotated.shape[2], -1))
        k_pages, _ = pool.layer(layer)
        head = torch.arange(heads, device=q.device)[:, None, None, None]
        slot = torch.arange(pool.page_size, device=q.device)[:, None]
        pages = table.pages[:, None, :, None, None]  # [rows, 1, most, 1, 1]
        of_span = dims[table.spans].transpose(1, 2)[:, :, :, None]  # [rows, kv_heads, most, 1, few]
        keys = k_pages[pages, head, slot, of_span].float()  # [rows, kv_heads, most, slots, few]
        queries = few[table.spans].transpose(1, 2)  # [rows, kv_heads, most, group, few]
        products = queries @ keys.transpose(-1, -2)
        unused = table.starts[..., None] + slot[:, 0] >= table.span_bound[table.spans][..., None]
        products = products.masked_fill(unused[:, None, :, None], -torch.inf)
        best: Tensor = products.amax(-1).transpose(2, 3)
        return best * candidates.rules[layer].softmax_scale

    def _num_dims(self, head_dim: int) -> int:
        return max(1, round(head_dim / 4))

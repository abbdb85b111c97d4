"""Attention over gathered pages on the CPU, with its log-sum-exp: the one product both CPU paths
share.

PyTorch's CPU flash attention does the work and returns the lse; a soft-cap, which it does not know,
takes the plain route through fp32 scores. """

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.types import ScoreRule


@dataclass(frozen=True)
class KeyBlock:
    """Equal-length runs of pages for some items, and what each of their rows must not see.

    ``gather`` indexes ``(page, kv_head)`` pairs as ``[items, kv_heads, pages]``, flat. ``bias`` is
    added to the scores, broadcastable to ``[items, kv_heads, rows, keys]``, None if all is visible.
    ``blind`` marks rows without any key, ``[items, 1, rows]``, None if there are none. """

    num_items: int
    gather: Tensor
    bias: Tensor | None
    blind: Tensor | None

    @classmethod
    def create(
        cls,
        *,
        pages: npt.NDArray[np.int64],
        visible: npt.NDArray[np.bool_],
        distance: npt.NDArray[np.int64] | None,
        group: int,
        num_kv_heads: int,
        rule: ScoreRule,
    ) -> "KeyBlock":
        """From pages ``[items, pages]`` and visibility ``[items, rows, keys]``; each row stands for
        the ``group`` query heads of a KV head. ``distance`` (query minus key position) is needed
        for ALiBi.
        """
        heads = np.arange(num_kv_heads)
        gather = (pages[:, None] * num_kv_heads + heads[:, None]).reshape(-1)
        blind_rows = ~visible.any(-1)
        blind = None
        if blind_rows.any():
            blind = torch.from_numpy(np.repeat(blind_rows, group, axis=1))[:, None]
        bias = _bias(visible, distance, group, rule)
        return cls(len(pages), torch.from_numpy(gather), bias, blind)

    def read(self, pages: Float[Tensor, "pages kv_heads page_size head_dim"]) -> Tensor:
        """The run of every item: ``[items, kv_heads, keys, head_dim]``."""
        _, num_kv_heads, page_size, head_dim = pages.shape
        rows = pages.view(-1, page_size * head_dim).index_select(0, self.gather)
        return rows.view(self.num_items, num_kv_heads, -1, head_dim)


def _bias(
    visible: npt.NDArray[np.bool_],
    distance: npt.NDArray[np.int64] | None,
    group: int,
    rule: ScoreRule,
) -> Tensor | None:
    if rule.alibi_slopes is not None and distance is not None:
        items, rows, keys = visible.shape
        slopes = rule.alibi_slopes.view(-1, 1, group, 1)
        bias = -slopes * torch.from_numpy(distance)[:, None, :, None].float()
        bias.masked_fill_(torch.from_numpy(~visible)[:, None, :, None], -torch.inf)
        return bias.reshape(items, -1, rows * group, keys)
    if visible.all():
        return None
    if visible.shape[1] > 1 and (visible == visible[:, :1]).all():
        visible = visible[:, :1]
    if visible.shape[1] > 1:
        visible = np.repeat(visible, group, axis=1)
    bias = torch.zeros(visible.shape)
    return bias.masked_fill_(torch.from_numpy(~visible), -torch.inf)[:, None]


def flash_attention_cpu(
    q: Float[Tensor, "items heads rows head_dim"],
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    v_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    keys: KeyBlock,
    rule: ScoreRule,
) -> tuple[Float[Tensor, "items heads rows head_dim"], Float[Tensor, "items heads rows"]]:
    """Attention of every item's rows over its own run; ``q`` is turned into the run's frame
    already.

    The output has the dtype of ``q``; rows that see nothing get ``(0, -inf)``.
    """
    return attend_dense(q, keys.read(k_pages), keys.read(v_pages), rule, keys.bias, keys.blind)


def attend_dense(
    q: Float[Tensor, "items heads rows head_dim"],
    k: Float[Tensor, "items kv_heads keys head_dim"],
    v: Float[Tensor, "items kv_heads keys head_dim"],
    rule: ScoreRule,
    bias: Tensor | None = None,
    blind: Tensor | None = None,
    causal: bool = False,
) -> tuple[Float[Tensor, "items heads rows head_dim"], Float[Tensor, "items heads rows"]]:
    """Attention with its lse. ``causal`` (no bias then) lets row i see keys up to i, from the
    first.
    """
    if k.dtype != q.dtype:
        k, v = k.to(q.dtype), v.to(q.dtype)
    if rule.soft_cap:
        out, lse = _attend_capped(q, k, v, rule, bias, causal)
    else:
        out, lse = torch._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias, scale=rule.softmax_scale
        )
    if blind is not None:
        # the library's (0, 0) for a row without keys is not the unit of the merge
        lse = lse.masked_fill(blind, -torch.inf)
        out = out.masked_fill(blind[..., None], 0.0)
    return out, lse


def _attend_capped(
    q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, bias: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1).float(), v.repeat_interleave(group, 1).float()
    scores = torch.matmul(q.float(), k.transpose(-1, -2)) * rule.softmax_scale
    scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
    if bias is not None:
        scores = scores + bias
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return torch.matmul(weights, v).to(q.dtype), lse

"""Attention over the pages that were chosen, each row and KV head reading its own.

Written with tensor operations that have the same shapes in every layer, on any device; no loop over
rows, heads or pages. What it answers is one state a row, which joins the merge with what the row
reads in any case.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from looseleaf.attention.selection import Candidates, Choice
from looseleaf.types import AttnState


def attend_chosen(
    layer: int,
    q: Float[Tensor, "rows qo_heads head_dim"],
    choice: Choice,
    candidates: Candidates,
) -> AttnState:
    """The state of each row over its chosen pages: fp32, ``(0, -inf)`` where it chose none."""
    k_pages, v_pages = candidates.pool.layer(layer)
    rule, heads = candidates.rules[layer], candidates.num_kv_heads
    row = torch.arange(len(q), device=q.device)[:, None, None]
    pages = candidates.table.pages[row, choice.ordinals]  # [rows, kv_heads, chosen]
    spans = candidates.table.spans[row, choice.ordinals]
    head = torch.arange(heads, device=q.device)[None, :, None]
    keys = k_pages[pages, head].float()  # [rows, kv_heads, chosen, page_size, head_dim]
    values = v_pages[pages, head].float()
    turned = candidates.turned(layer, q)
    turned = turned.unflatten(1, (heads, -1))  # [spans, kv_heads, group, head_dim]
    queries = turned[spans, head]  # [rows, kv_heads, chosen, group, head_dim]
    scores = queries @ keys.transpose(-1, -2) * rule.softmax_scale
    if rule.soft_cap:
        scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
    seen = _seen(layer, choice, candidates, spans)
    scores = scores.masked_fill(~seen[:, :, :, None], -torch.inf)
    # the chosen pages of a head are one run of keys
    flat = scores.transpose(2, 3).flatten(3)  # [rows, kv_heads, group, keys]
    lse = flat.logsumexp(-1)
    weights = (flat - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    out = weights @ values.flatten(2, 3)
    return AttnState(out.flatten(1, 2), lse.flatten(1, 2))


def _seen(
    layer: int, choice: Choice, candidates: Candidates, spans: Int[Tensor, "rows kv_heads chosen"]
) -> Bool[Tensor, "rows kv_heads chosen page_size"]:
    """Which keys of the chosen pages their row sees."""
    table, window = candidates.table, candidates.rules[layer].window
    device = spans.device
    row = torch.arange(len(spans), device=device)[:, None, None]
    slots = torch.arange(candidates.pool.page_size, device=device)
    places = table.starts[row, choice.ordinals][..., None] + slots
    column = torch.arange(spans.shape[2], device=device)
    seen = (column < choice.counts[..., None])[..., None] & (
        places < table.span_bound[spans][..., None]
    )
    if window:
        seen = seen & (candidates.span_positions[spans][..., None] - places < window)
    if len(table.mask_words):
        first = table.span_mask[spans][..., None]
        word = (first + places // 32).clamp(0, len(table.mask_words) - 1)
        hidden = (table.mask_words[word] >> places % 32) & 1
        seen = seen & ~((first >= 0) & (hidden == 1))
    return seen

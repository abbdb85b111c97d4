"""Scores, visibility and softmax, dense: the equations of `ScoreRule` and `AttnState`."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from looseleaf.ops.page_dtypes import widen
from looseleaf.types import AttnState, ScoreRule


def score(
    q: Float[Tensor, "rows qo_heads head_dim"],
    k: Float[Tensor, "kv_heads keys head_dim"],
    distance: Int[Tensor, "rows keys"],
    visible: Bool[Tensor, "rows keys"],
    rule: ScoreRule,
) -> Float[Tensor, "rows qo_heads keys"]:
    """Scores of rows and keys in one frame; -inf for hidden keys.

    ``distance`` is the query's position minus the key's."""
    grouped = q.unflatten(1, (k.shape[0], -1))
    product = torch.einsum("rhgd,hnd->rhgn", grouped, k).flatten(1, 2) * rule.softmax_scale
    if rule.soft_cap:
        product = rule.soft_cap * torch.tanh(product / rule.soft_cap)
    if rule.alibi_slopes is not None:
        product = product - rule.alibi_slopes[:, None].to(q.dtype) * distance[:, None]
    return product.masked_fill(~visible[:, None], -torch.inf)


def softmax_state(
    scores: Float[Tensor, "rows qo_heads keys"], v: Float[Tensor, "kv_heads keys head_dim"]
) -> AttnState:
    """The state of every row and head: the softmax of its scores over the values."""
    lse = scores.logsumexp(-1)
    # a row without keys: a finite pivot keeps its weights 0, not NaN
    weight = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    # keys that no row sees may be NaN: their weight of 0 would not clear it
    seen = (scores > -torch.inf).flatten(0, 1).any(0)
    v = torch.where(seen[:, None], v, 0.0)
    out = torch.einsum("rhgn,hnd->rhgd", weight.unflatten(1, (v.shape[0], -1)), v)
    return AttnState(out.flatten(1, 2), lse)


def hidden(
    mask_words: Int[Tensor, " words"],
    first_word: Int[Tensor, " rows"],
    positions: Int[Tensor, " keys"],
) -> Bool[Tensor, "rows keys"]:
    """Whether a row's bitmap over frame positions hides a key; first word -1: no bitmap."""
    if not mask_words.numel():
        return torch.zeros_like(first_word[:, None] + positions, dtype=torch.bool)
    # keys after a row's bound may be outside its bitmap: their result is unused
    word = (first_word[:, None] + positions // 32).clamp(0, mask_words.numel() - 1).long()
    bit = (mask_words[word] >> positions % 32) & 1
    return (bit == 1) & (first_word >= 0)[:, None]


def gather_pages(
    pages: Float[Tensor, "pages kv_heads page_size head_dim"], indices: Int[Tensor, " run"]
) -> Float[Tensor, "kv_heads keys head_dim"]:
    """The vectors of a run of pages, concatenated: fp32, or fp64 for fp64."""
    run = pages[indices.long()].transpose(0, 1).flatten(1, 2)
    return widen(run)


def run_positions(first: Int[Tensor, " run"], page_size: int) -> Int[Tensor, " keys"]:
    """Frame positions of all slots of a run of pages; ``first`` holds those of the first slots."""
    slots = torch.arange(page_size, device=first.device, dtype=first.dtype)
    return (first[:, None] + slots).flatten()

"""The choice from scores: agreement of query heads, mandatory pages, number of pages."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from looseleaf.attention.select.policy import Candidates, Choice
from looseleaf.config import GroupRule
from looseleaf.sparse.budget import Budget


def choose_pages(
    scores: Float[Tensor, "rows kv_heads group most"],
    candidates: Candidates,
    layer: int,
    budget: Budget,
    group: GroupRule,
) -> Choice:
    """The candidates with the largest scores, up to each row's limit in the layer.

    Pages outside the layer's window rank last, the budget's sink and recent pages first. Query
    heads agree by the largest of their scores, or by the sum of their expected shares of attention
    (a softmax over pages). A mass budget ends once the mean of these shares over the chosen pages
    reaches it. Ties go to the earlier page.
    """
    table = candidates.table
    worth, shares = _worth(scores, candidates, layer, budget, group)
    ranked, order = _ranked(worth, table.most_chosen)
    rank = torch.arange(order.shape[-1], device=order.device)
    kept = (rank < table.limits[layer][:, None, None]) & (ranked > -torch.inf)
    if budget.mass is not None:
        assert shares is not None
        kept &= _within(budget.mass, shares, ranked, order)
    # ascending, with unselected pages last
    past = table.pages.shape[1]
    ordinals = order.masked_fill(~kept, past).sort(-1).values
    return Choice(ordinals.clamp_max(past - 1), kept.sum(-1))


def page_worth(
    scores: Float[Tensor, "rows kv_heads group most"],
    candidates: Candidates,
    layer: int,
    budget: Budget,
    group: GroupRule,
) -> Float[Tensor, "rows kv_heads most"]:
    """The ranks of `choose_pages`: inf for mandatory pages, -inf for pages beyond the mass or the
    layer's window."""
    worth, shares = _worth(scores, candidates, layer, budget, group)
    if budget.mass is None:
        return worth
    assert shares is not None
    ranked, order = _ranked(worth, worth.shape[-1])
    within = _within(budget.mass, shares, ranked, order)
    return worth.scatter(-1, order, ranked.masked_fill(~within, -torch.inf))


def _worth(
    scores: Float[Tensor, "rows kv_heads group most"],
    candidates: Candidates,
    layer: int,
    budget: Budget,
    group: GroupRule,
) -> tuple[Float[Tensor, "rows kv_heads most"], Float[Tensor, "rows kv_heads most"] | None]:
    """The scores that query heads agree on, and their expected shares of attention if needed."""
    visible = candidates.visible(layer)[:, None]  # [rows, 1, most]
    scores = scores.masked_fill(~visible[:, :, None], -torch.inf)
    shares = None
    if group == "sum" or budget.mass is not None:
        shares = _shares(_capped(scores, candidates.rules[layer].soft_cap))
    worth = shares if group == "sum" and shares is not None else scores.amax(2)
    forced = candidates.forced(budget.sink, budget.recent)[:, None]
    worth = worth.masked_fill(forced & visible, torch.inf)
    return worth.masked_fill(~visible, -torch.inf), shares


def _capped(scores: Tensor, soft_cap: float) -> Tensor:
    """Soft-capped scores, as the softmax takes them; ranking needs no cap, shares do."""
    if not soft_cap:
        return scores
    capped = soft_cap * torch.tanh(scores / soft_cap)
    return capped.masked_fill(scores == -torch.inf, -torch.inf)


def _shares(
    scores: Float[Tensor, "rows kv_heads group most"],
) -> Float[Tensor, "rows kv_heads most"]:
    """The mean over query heads of a softmax over pages; 0 if all pages are hidden."""
    return scores.softmax(-1).nan_to_num(0.0).mean(2)


def _within(
    mass: float,
    shares: Float[Tensor, "rows kv_heads most"],
    ranked: Float[Tensor, "rows kv_heads count"],
    order: Int[Tensor, "rows kv_heads count"],
) -> Bool[Tensor, "rows kv_heads count"]:
    """Mask of the best pages that together hold ``mass``, and of the mandatory ones."""
    ranked_shares = shares.gather(-1, order)
    before = ranked_shares.cumsum(-1) - ranked_shares
    return (before < mass) | (ranked == torch.inf)


def _ranked(
    worth: Float[Tensor, "rows kv_heads most"], count: int
) -> tuple[Float[Tensor, "rows kv_heads count"], Int[Tensor, "rows kv_heads count"]]:
    """The ``count`` best scores, descending, with their ordinals."""
    ranked, order = worth.sort(dim=-1, descending=True, stable=True)
    return ranked[..., :count], order[..., :count]

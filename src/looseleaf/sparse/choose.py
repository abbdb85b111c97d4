"""From scores to a choice: how query heads agree, what is read in any case, and how many pages."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from looseleaf.attention.selection import Candidates, Choice
from looseleaf.config import GroupRule
from looseleaf.sparse.budget import Budget


def choose_pages(
    scores: Float[Tensor, "rows kv_heads group most"],
    candidates: Candidates,
    layer: int,
    budget: Budget,
    group: GroupRule,
) -> Choice:
    """The candidates with the largest scores, as many as each row's limit in
    the layer.

    Pages outside the layer's window come last, those of the budget's sink and recent pages first.
    Query heads agree by the largest of their scores, or by the sum of the shares of attention that
    they expect (a softmax over pages). A budget of mass stops once the mean of these shares over
    the chosen pages reaches it. Ties go to the earlier page.
    """
    table = candidates.table
    visible = candidates.visible(layer)[:, None]  # [rows, 1, most]
    scores = scores.masked_fill(~visible[:, :, None], -torch.inf)
    shares = None
    if group == "sum" or budget.mass is not None:
        shares = _shares(scores)
    worth = shares if group == "sum" and shares is not None else scores.amax(2)
    forced = _forced(candidates, budget)[:, None]
    ranked, order = _ranked(worth, forced & visible, table.most_chosen)
    rank = torch.arange(order.shape[-1], device=order.device)
    kept = (rank < table.limits[layer][:, None, None]) & (ranked > -torch.inf)
    if budget.mass is not None:
        assert shares is not None
        held = shares.gather(-1, order)
        before = held.cumsum(-1) - held
        kept &= (before < budget.mass) | (ranked == torch.inf)
    # rising, and what is not kept behind all that is
    past = table.pages.shape[1]
    ordinals = order.masked_fill(~kept, past).sort(-1).values
    return Choice(ordinals.clamp_max(past - 1), kept.sum(-1))


def _shares(
    scores: Float[Tensor, "rows kv_heads group most"],
) -> Float[Tensor, "rows kv_heads most"]:
    """The mean over query heads of what a softmax over pages gives each; 0 where all is hidden."""
    return scores.softmax(-1).nan_to_num(0.0).mean(2)


def _forced(candidates: Candidates, budget: Budget) -> Bool[Tensor, "rows most"]:
    """The first pages, and the last of those that are not read anyway."""
    table = candidates.table
    column = torch.arange(table.pages.shape[1], device=table.pages.device)
    others = torch.tensor([row.num_other(candidates.pool.page_size) for row in candidates.rows])
    recent = (budget.recent - others.to(column.device)).clamp_min(0)
    last = table.num_pages - recent
    return (column < budget.sink) | (
        (column >= last[:, None]) & (column < table.num_pages[:, None])
    )


def _ranked(
    worth: Float[Tensor, "rows kv_heads most"],
    forced: Bool[Tensor, "rows 1 most"],
    count: int,
) -> tuple[Tensor, Tensor]:
    """The ``count`` best, best first, with their ordinals; those that are forced come first."""
    worth = worth.masked_fill(forced, torch.inf)
    ranked, order = worth.sort(dim=-1, descending=True, stable=True)
    return ranked[..., :count], order[..., :count]

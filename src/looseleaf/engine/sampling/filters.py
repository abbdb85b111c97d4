"""Filters of the tokens to draw: each gives a threshold per row, and lower logits are removed.

So tokens of equal probability are treated alike. Parameters are a column with a value per row.
Logits are already divided by the temperature.
"""

from jaxtyping import Float, Int
from torch import Tensor

Column = Float[Tensor, "rows 1"]


def min_p_threshold(logits: Float[Tensor, "rows vocab"], min_p: Column) -> Column:
    """The logit of a token ``min_p`` times as likely as the likeliest one."""
    return logits.amax(-1, keepdim=True) + min_p.log()


def top_k_threshold(logits: Float[Tensor, "rows vocab"], top_k: Int[Tensor, "rows 1"]) -> Column:
    """The ``top_k``-th largest logit, the smallest logit if there are fewer."""
    largest = logits.topk(min(int(top_k.max()), logits.shape[-1])).values
    return largest.gather(-1, top_k.clamp_max(largest.shape[-1]) - 1)


def top_p_threshold(
    logits: Float[Tensor, "rows vocab"], top_p: Column, num_candidates: int
) -> Column:
    """The smallest logit with less than ``top_p`` of the mass before it, in falling order.

    Sorts the ``num_candidates`` largest logits, and all if their mass is below ``top_p``.
    """
    mass = logits.logsumexp(-1, keepdim=True)
    largest = logits.topk(min(num_candidates, logits.shape[-1])).values
    kept = _num_kept(largest, mass, top_p)
    if largest.shape[-1] < logits.shape[-1] and bool((kept == largest.shape[-1]).any()):
        largest = logits.sort(dim=-1, descending=True).values
        kept = _num_kept(largest, mass, top_p)
    return largest.gather(-1, kept - 1)


def _num_kept(
    descending: Float[Tensor, "rows candidates"], mass: Column, top_p: Column
) -> Int[Tensor, "rows 1"]:
    probabilities = (descending - mass).double().exp()
    before = probabilities.cumsum(-1) - probabilities
    # rounding may put mass before the first
    return (before < top_p).sum(-1, keepdim=True).clamp_min(1)

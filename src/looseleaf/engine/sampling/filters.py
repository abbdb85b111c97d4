"""Which tokens may be drawn: each rule is one threshold a row, and a token stays if it reaches it.

Because a threshold is all there is, tokens that are equally likely are treated alike, whatever
their order. Parameters come as a column, one row each; logits are scaled by the temperature
already.
"""

from jaxtyping import Float, Int
from torch import Tensor

Column = Float[Tensor, "rows 1"]


def min_p_threshold(logits: Float[Tensor, "rows vocab"], min_p: Column) -> Column:
    """The logit of a token ``min_p`` times as likely as the likeliest one."""
    return logits.amax(-1, keepdim=True) + min_p.log()


def top_k_threshold(logits: Float[Tensor, "rows vocab"], top_k: Int[Tensor, "rows 1"]) -> Column:
    """The ``top_k``-th largest logit, the smallest of all where there are fewer."""
    largest = logits.topk(min(int(top_k.max()), logits.shape[-1])).values
    return largest.gather(-1, top_k.clamp_max(largest.shape[-1]) - 1)


def top_p_threshold(
    logits: Float[Tensor, "rows vocab"], top_p: Column, num_candidates: int
) -> Column:
    """Smallest logit before which, in falling order, less than ``top_p`` of the mass lies.

    Sorts only the ``num_candidates`` largest logits unless the mass asked for reaches beyond them.
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
    # the first has nothing before it, but for the rounding of the difference
    return (before < top_p).sum(-1, keepdim=True).clamp_min(1)

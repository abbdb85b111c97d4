"""Attention states that rows keep from step to step (RetroAttention, arXiv 2508.09001)."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class KeptStates:
    """The kept state of row ``r`` is at index ``at[r]``; -1 if it has none.

    The row's states from ``first[r]`` on are merged into it, and the result is written back. A row
    with ``fresh[r]`` starts from the empty state instead. States are fp32, since they are merged
    many times."""

    out: Float[Tensor, "places heads head_dim"]
    lse: Float[Tensor, "places heads"]
    at: Int[Tensor, " rows"]
    first: Int[Tensor, " rows"]
    fresh: Int[Tensor, " rows"]

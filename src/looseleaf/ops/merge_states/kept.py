"""Attention states that rows keep from step to step, and go on from (RetroAttention, arXiv
2508.09001)."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class KeptStates:
    """States of which row ``r`` has that at ``at[r]``, or none if that is -1.

    Its states from ``first[r]`` on are merged with it, and the result is written back; one that is
    ``fresh`` starts from the empty state. Fp32, like all states that are merged again and again.
    """

    out: Float[Tensor, "places heads head_dim"]
    lse: Float[Tensor, "places heads"]
    at: Int[Tensor, " rows"]
    first: Int[Tensor, " rows"]
    fresh: Int[Tensor, " rows"]

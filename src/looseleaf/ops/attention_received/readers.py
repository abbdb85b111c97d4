"""The rows whose attention counts."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Readers:
    """Unrotated queries, with the log-sum-exp of their attention over *all* keys.

    What a row reads counts ``weight`` times; of keys only those that truly stand before position
    ``before`` count."""

    q: Float[Tensor, "rows qo_heads head_dim"]
    lse: Float[Tensor, "rows qo_heads"]
    weight: Float[Tensor, " rows"]
    before: Int[Tensor, " rows"]

"""The rows whose attention counts in `looseleaf.ops.attention_received`."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Readers:
    """Unrotated queries, with the lse of their attention over *all* keys.

    ``weight`` scales the attention of a row. A row counts only keys at true positions below
    ``before``."""

    q: Float[Tensor, "rows qo_heads head_dim"]
    lse: Float[Tensor, "rows qo_heads"]
    weight: Float[Tensor, " rows"]
    before: Int[Tensor, " rows"]

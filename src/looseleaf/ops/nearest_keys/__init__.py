"""Exact search for the keys with the largest inner products, to build and to evaluate indexes.

Memory is bounded by one tile of scores plus the result, for any number of queries and keys."""

from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.errors import InvalidOption
from looseleaf.ops.dispatch import Implementation
from looseleaf.ops.nearest_keys.reference import NearestKeys, nearest_keys_reference

__all__ = ["NearestKeys", "nearest_keys"]


def nearest_keys(
    q: Float[Tensor, "queries head_dim"],
    keys: Float[Tensor, "keys head_dim"],
    count: int,
    bounds: Int[Tensor, " queries"] | None = None,
    implementation: Implementation = "auto",
) -> NearestKeys:
    """The ``count`` keys with the largest ``q . key`` per query, best first.

    With ``bounds``, query i sees only keys before ``bounds[i]`` (causal neighbours). A query that
    sees fewer than ``count`` keys gets ids -1 and scores -inf at the end. Queries and keys are in
    one frame; products are fp32. Source: RetrievalAttention, section 3.2 and Algorithm 2.

    Raises InvalidOption if ``count`` is not positive, and for an implementation other than ``auto``
    and ``reference``."""
    if count < 1:
        raise InvalidOption(f"nearest_keys finds at least one key, not {count}")
    if implementation not in ("auto", "reference"):
        raise InvalidOption(
            f"nearest_keys has no {implementation} implementation: use auto or reference"
        )
    return nearest_keys_reference(q, keys, count, bounds)

"""Checks of queries and pages that every attention operator makes.

The checks read dtypes, shapes and strides only. Each operator checks the contents of its own lists.
"""

from torch import Tensor

from looseleaf.errors import InvalidOption
from looseleaf.types import ScoreRule


def require_attention(q: Tensor, pages: tuple[Tensor, Tensor], rule: ScoreRule) -> None:
    """Checks the shapes and dtypes of an attention call.

    Raises InvalidOption in four cases: K and V pages differ in shape or dtype; the head size of
    ``q`` and pages differ; KV heads do not divide query heads; ``alibi_slopes`` is not
    ``[qo_heads]``."""
    k_pages, v_pages = pages
    shape = _, num_kv_heads, _, head_dim = k_pages.shape
    if v_pages.shape != shape or v_pages.dtype is not k_pages.dtype:
        raise InvalidOption(
            f"pages of K are {k_pages.dtype} {[*shape]}, pages of V {v_pages.dtype} "
            f"{[*v_pages.shape]}: make them alike"
        )
    _, num_qo_heads, q_dim = q.shape
    if q_dim != head_dim:
        raise InvalidOption(f"queries have {q_dim} dims and keys {head_dim}: make them the same")
    if num_qo_heads % num_kv_heads:
        raise InvalidOption(
            f"{num_qo_heads} query heads can't be shared out among {num_kv_heads} KV heads: use a "
            "multiple"
        )
    slopes = rule.alibi_slopes
    if slopes is not None and slopes.shape != (num_qo_heads,):
        raise InvalidOption(
            f"alibi_slopes are {[*slopes.shape]}: make them [{num_qo_heads}], one per query head"
        )

"""What every attention operator asks of queries and pages, said in sentences.

Only what costs nothing to look at: dtypes, shapes and strides. What lists name is looked at by
those who read them."""

from torch import Tensor

from looseleaf.errors import InvalidOption
from looseleaf.types import ScoreRule


def require_attention(q: Tensor, pages: tuple[Tensor, Tensor], rule: ScoreRule) -> None:
    """Raises InvalidOption for pages of K and V that differ, heads of another size than those of
    ``q``, query heads that KV heads can't share, and slopes that are not one a query head."""
    k_pages, v_pages = pages
    shape = _, num_kv_heads, _, head_dim = k_pages.shape
    if v_pages.shape != shape or v_pages.dtype is not k_pages.dtype:
        raise InvalidOption(
            f"pages of K are {k_pages.dtype} {[*shape]} and those of V {v_pages.dtype} "
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
            f"alibi_slopes are {[*slopes.shape]}: make them {num_qo_heads}, one a query head"
        )

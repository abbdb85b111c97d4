"""Attention of query rows over page runs: one partial state for every (item, row) of a work list.

One launch over all items, shared or private, grouped or split along the keys; `merge_states` joins
the states of a row. This is flash-decoding, RelayAttention (arXiv 2402.14808 §3) and cascade
attention at once, with a frame per row (LazyAttention, arXiv 2606.04302): rows share an item
whatever their offsets."""

from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.dispatch import Implementation, choose
from looseleaf.ops.partial_attention.reference import partial_attention_reference
from looseleaf.ops.partial_attention.work_list import Tile, WorkList
from looseleaf.types import AttnState, Rotation, ScoreRule

__all__ = ["Tile", "WorkList", "partial_attention"]


def partial_attention(
    q: Float[Tensor, "rows qo_heads head_dim"],
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    v_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    work: WorkList,
    rotation: Rotation,
    rule: ScoreRule,
    slot_positions: Int[Tensor, "pages page_size"] | None = None,
    implementation: Implementation = "auto",
) -> AttnState:
    """The partial states of ``work``: fp32 ``out`` ``[states, heads, head_dim]`` and ``lse``.

    ``q`` is unrotated. Row ``r`` sees key ``j`` of an item (frame position ``p_j``) if ``0 <= p_j <
    bound``, the entry's mask bit is clear, and ``row_position - Δ - p_j < window`` when the rule
    has a window. A key that is not visible is not read as a number: its page may hold anything, NaN
    included; ``cpu`` alone needs finite pages, as a `PagePool` has them. ``slot_positions`` is
    needed if any item is explicit. Feed the result to `merge_states` with
    ``work.row_state_indptr``. Where no entry writes, lse is -inf and out is undefined: only a merge
    may read it. Of a ``whole`` list the states are those of the rows, in the dtype of ``q``."""
    chosen = choose(implementation, q, cpu="cpu", native=True)
    assert work.page_seen is None or chosen in ("triton", "reference"), (
        "those of a CPU choose apart"
    )
    if chosen == "triton":
        from looseleaf.ops.partial_attention.kernel import partial_attention_triton

        return partial_attention_triton(q, k_pages, v_pages, work, rotation, rule, slot_positions)
    if chosen == "native":
        from looseleaf.ops.partial_attention.native import partial_attention_native as attend
    elif chosen == "cpu":
        from looseleaf.ops.partial_attention.cpu import partial_attention_cpu as attend
    else:
        attend = partial_attention_reference
    states = attend(q, k_pages, v_pages, work, rotation, rule, slot_positions)
    if work.whole:
        return AttnState(states.out[: len(q)].to(q.dtype), states.lse[: len(q)])
    return states

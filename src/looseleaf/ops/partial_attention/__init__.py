"""Attention of query rows over page runs: one partial state for every (item, row) of a work list.

One launch over all items, shared or private, grouped or split along the keys; `merge_states` joins
the states of a row. This is flash-decoding, RelayAttention (arXiv 2402.14808 §3) and cascade
attention at once, with a frame per row (LazyAttention, arXiv 2606.04302): rows share an item
whatever their offsets."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.errors import InvalidOption
from looseleaf.ops.attention_inputs import require_attention
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
    has a window. What a row sees and is not a number makes its state NaN. A key that no row of an
    item sees is not read as a number: its slot may hold anything, NaN included; one that some of
    them see must be finite for the others as well. ``cpu`` alone needs finite pages, as a
    `PagePool` has them. ``slot_positions`` is needed if any item is explicit. Feed the result to
    `merge_states` with ``work.row_state_indptr``. Where no entry writes, lse is -inf and out is
    undefined: only a merge may read it. Of a ``whole`` list the states are those of the rows, in
    the dtype of ``q``; for an fp64 query, which only the reference takes, all is fp64.

    K and V pages are laid out alike and the numbers of a key lie side by side; else strides are
    free: views of a cache with K and V in one tensor, or slots before heads, are read as they
    are. ``cpu`` reads pages in place that are contiguous, page after page or KV head after KV
    head, and copies those that the list names of others. It has no items of one KV head: ``native``
    has, and no ``page_seen``. Raises InvalidOption for what does not fit together."""
    require_attention(q, (k_pages, v_pages), rule)
    own: Implementation = "cpu"
    if q.dtype is torch.float64 or work.page_seen is not None:
        own = "reference"
    chosen = choose(implementation, q, cpu=own, native=True)
    if work.page_seen is not None and chosen == "native":
        raise InvalidOption("the C kernels have no page_seen: use implementation='reference'")
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

"""Attention of query rows over page runs: a partial state for every (item, row) of a work list.

One launch reads all items: shared or private, grouped, or split along the keys. `merge_states`
joins the states of a row. This unifies flash-decoding, RelayAttention (arXiv 2402.14808 §3) and
cascade attention. Each row has its own frame offset (LazyAttention, arXiv 2606.04302), so rows
share an item at any offsets."""

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
    """Partial states of ``work``: fp32 ``out`` ``[states, qo_heads, head_dim]``, ``lse`` ``[states,
    qo_heads]``.

    ``q`` is unrotated. Entry ``e`` of an item rotates query row ``r`` by ``row_position - Δ`` and
    sees the key at frame position ``p`` under three conditions: ``0 <= p < bound``; the entry's
    mask bit is clear; and ``row_position - Δ - p < window`` if the rule has a window. Its state is
    ``merge_states`` with `work.row_state_indptr` input. A state without an entry has an lse of -inf
    and an undefined ``out``.

    - A visible NaN makes the state NaN. A key hidden from all rows of an item may hold anything. A
      key visible to some rows must be finite for the others. ``cpu`` requires finite pages.
    - ``slot_positions`` is required for explicit items.
    - States of a ``whole`` list are the rows' final states, in the dtype of ``q``.
    - An fp64 query runs on the reference only, and all results are fp64.
    - If K and V pages are one tensor (latent attention), ``out`` has values after the rotated dims
      only. The dims before hold finite numbers.
    - K and V pages have the same strides, with contiguous dims. ``cpu`` copies the pages that it
      cannot read in place (`reads_in_place`).
    - ``cpu`` has no items of a single KV head; ``native`` has no ``page_seen``.

    Raises InvalidOption for shapes or dtypes that do not match, missing ``slot_positions``, and
    features that the implementation lacks."""
    require_attention(q, (k_pages, v_pages), rule)
    cpu_default: Implementation = "cpu"
    if q.dtype is torch.float64 or work.page_seen is not None:
        cpu_default = "reference"
    chosen = choose(implementation, q, cpu=cpu_default, native=True)
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

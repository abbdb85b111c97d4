"""Attention of new rows over spans of pages, each span in its own frame, by the rule key <= query.

Rows carry explicit positions, so gaps between them (blend, holes) are nothing special: a row sees
keys at positions up to its own and nothing else, and no mask is materialised. The query turns once
per span (docs/frames.md; LazyAttention turns every key tile instead)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.attention_inputs import require_attention
from looseleaf.ops.dispatch import Implementation, choose
from looseleaf.ops.gather_kv import GATHERED_SIZE, KeySources, gather_kv
from looseleaf.ops.page_dtypes import FP8
from looseleaf.ops.prefill_attention.reference import prefill_attention_reference
from looseleaf.ops.prefill_attention.span_list import SpanList
from looseleaf.types import AttnState, Rotation, ScoreRule

__all__ = ["SpanList", "gathered_pages", "prefill_attention"]


def prefill_attention(
    q: Float[Tensor, "rows qo_heads head_dim"],
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    v_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    spans: SpanList,
    rotation: Rotation,
    rule: ScoreRule,
    slot_positions: Int[Tensor, "pages page_size"] | None = None,
    implementation: Implementation = "auto",
) -> AttnState:
    """One state a row: ``out`` in the dtype of ``q``, ``lse`` fp32.

    ``q`` is unrotated; the keys of this step are in the pages already. A row sees key ``p`` of a
    span if ``Δ + p <= row_position``, ``p < span_length`` (explicit: the slot's position is >= 0),
    its mask bit is clear, and ``row_position - Δ - p < window`` when the rule has one. A row
    without keys: ``(0, -inf)``. What a row sees and is not a number makes its state NaN; what no
    row of its tile sees may be anything, but for ``cpu``, which needs finite pages.

    K and V pages are laid out as `looseleaf.ops.partial_attention` says. Only the reference takes
    an fp64 query; its ``lse`` is fp64. Raises InvalidOption for what does not fit together."""
    require_attention(q, (k_pages, v_pages), rule)
    own: Implementation = "reference" if q.dtype is torch.float64 else "cpu"
    chosen = choose(implementation, q, cpu=own)
    if spans.source_slots is not None:
        k_pages, v_pages = gathered_pages(q, k_pages, v_pages, spans, rotation, implementation)
        slot_positions = None
    if chosen == "triton":
        from looseleaf.ops.prefill_attention.kernel import prefill_attention_triton

        return prefill_attention_triton(q, k_pages, v_pages, spans, rotation, rule, slot_positions)
    if chosen == "cpu":
        from looseleaf.ops.prefill_attention.cpu import prefill_attention_cpu

        return prefill_attention_cpu(q, k_pages, v_pages, spans, rotation, rule, slot_positions)
    return prefill_attention_reference(q, k_pages, v_pages, spans, rotation, rule, slot_positions)


def gathered_pages(
    q: Float[Tensor, "rows qo_heads head_dim"],
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    v_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    spans: SpanList,
    rotation: Rotation,
    implementation: Implementation = "auto",
) -> tuple[
    Float[Tensor, "gathered kv_heads gathered_size head_dim"],
    Float[Tensor, "gathered kv_heads gathered_size head_dim"],
]:
    """The pages that a list with ``source_slots`` is of, gathered: keys stand where their rows read
    them. e4m3 is widened to the dtype of ``q``."""
    slots, turns = spans.source_slots, spans.source_turns
    assert slots is not None and turns is not None, "a list whose keys are gathered"
    heads, head_dim = k_pages.shape[1], k_pages.shape[3]
    like = q if k_pages.dtype is FP8 else k_pages
    k, v = like.new_empty((2, len(slots) // GATHERED_SIZE, heads, GATHERED_SIZE, head_dim))
    chosen = choose(implementation, q, cpu="cpu")
    how: Implementation = "triton" if chosen == "triton" else "reference"
    gather_kv(k_pages, v_pages, KeySources(slots, turns), rotation, k, v, how)
    return k, v

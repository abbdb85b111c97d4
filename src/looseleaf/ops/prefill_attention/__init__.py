"""Attention of new rows over spans of pages, each in its own frame, with the mask key <= query.

Rows have explicit positions, so gaps between them (blend, holes) need no special case. A row sees
keys up to its own position, without a mask in memory. The query is rotated once per span
(docs/frames.md); LazyAttention rotates every tile of keys instead."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.errors import InvalidOption
from looseleaf.ops.attention_inputs import require_attention
from looseleaf.ops.dispatch import Implementation, choose
from looseleaf.ops.gather_kv import GATHERED_SIZE, KeySources, gather_kv
from looseleaf.ops.page_dtypes import FP8, same_memory
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
    """One state per row: ``out`` in the dtype of ``q``, ``lse`` fp32.

    ``q`` is unrotated; the pages already hold the keys of this step. A row sees key ``p`` of a span
    under four conditions: ``Δ + p <= row_position``; ``p < span_length`` (for explicit spans: the
    slot's position is >= 0); its mask bit is clear; and ``row_position - Δ - p < window`` if the
    rule has a window. The state is the softmax over all visible keys of the request's spans; ``(0,
    -inf)`` without keys.

    - A visible NaN makes the state NaN. A key hidden from all rows of a tile may hold anything;
      ``cpu`` requires finite pages.
    - K and V pages have the layout of `looseleaf.ops.partial_attention`.
    - An fp64 query runs on the reference only; its ``lse`` is fp64.

    Raises InvalidOption for shapes or dtypes that do not match, a span longer than its pages,
    missing ``slot_positions`` of explicit spans, and a wrong ``value_start``."""
    require_attention(q, (k_pages, v_pages), rule)
    if spans.value_start not in (0, rotation.rotary_dim):
        raise InvalidOption(
            f"value_start={spans.value_start} must be 0 or the number of rotated dims, "
            f"{rotation.rotary_dim}"
        )
    cpu_default: Implementation = "reference" if q.dtype is torch.float64 else "cpu"
    chosen = choose(implementation, q, cpu=cpu_default)
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
    q: Float[Tensor, "rows qo_heads query_dim"],
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    v_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    spans: SpanList,
    rotation: Rotation,
    implementation: Implementation = "auto",
) -> tuple[
    Float[Tensor, "gathered kv_heads gathered_size head_dim"],
    Float[Tensor, "gathered kv_heads gathered_size head_dim"],
]:
    """The gathered K and V pages of a list with ``source_slots``: keys at their positions in the
    prompt.

    e4m3 is widened to the dtype of ``q``."""
    slots, offsets = spans.source_slots, spans.source_turns
    assert slots is not None and offsets is not None, "a list with source_slots"
    heads, head_dim = k_pages.shape[1], k_pages.shape[3]
    like = q if k_pages.dtype is FP8 else k_pages
    # keys that are the values are gathered once
    planes = 1 if same_memory(k_pages, v_pages) else 2
    sides = like.new_empty((planes, len(slots) // GATHERED_SIZE, heads, GATHERED_SIZE, head_dim))
    k, v = sides[0], sides[-1]
    gather: Implementation = "reference"
    if choose(implementation, q) == "triton":
        gather = "triton"
    gather_kv(k_pages, v_pages, KeySources(slots, offsets), rotation, k, v, gather)
    return k, v

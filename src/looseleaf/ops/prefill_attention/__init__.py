"""Attention of new rows over spans of pages, each span in its own frame, by the rule key <= query.

Rows carry explicit positions, so gaps between them (blend, holes) are nothing special: a row sees
keys at positions up to its own and nothing else, and no mask is materialised. The query turns once
per span (notes/sharing §1; LazyAttention turns every key tile instead)."""

from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.dispatch import Implementation, choose
from looseleaf.ops.prefill_attention.reference import prefill_attention_reference
from looseleaf.ops.prefill_attention.span_list import SpanList
from looseleaf.types import AttnState, Rotation, ScoreRule

__all__ = ["SpanList", "prefill_attention"]


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
    without keys: ``(0, -inf)``."""
    chosen = choose(implementation, q, cpu="cpu")
    if chosen == "triton":
        from looseleaf.ops.prefill_attention.kernel import prefill_attention_triton

        return prefill_attention_triton(q, k_pages, v_pages, spans, rotation, rule, slot_positions)
    if chosen == "cpu":
        from looseleaf.ops.prefill_attention.cpu import prefill_attention_cpu

        return prefill_attention_cpu(q, k_pages, v_pages, spans, rotation, rule, slot_positions)
    return prefill_attention_reference(q, k_pages, v_pages, spans, rotation, rule, slot_positions)

"""The attention that stored keys receive from some rows: who is read, and how much.

Blending asks it of the rows that tell which tokens matter."""

from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.attention_received.readers import Readers
from looseleaf.ops.attention_received.reference import attention_received_reference
from looseleaf.ops.dispatch import Implementation, choose
from looseleaf.ops.prefill_attention.span_list import SpanList
from looseleaf.types import Rotation, ScoreRule

__all__ = ["Readers", "attention_received"]


def attention_received(
    readers: Readers,
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    spans: SpanList,
    num_keys: int,
    rotation: Rotation,
    rule: ScoreRule,
    implementation: Implementation = "auto",
) -> Float[Tensor, " keys"]:
    """For each of the ``num_keys`` keys of ``spans``, one span after another, the largest weight of
    it in any row and head, fp32.

    Rows are those of ``spans``. What a row does not see by `prefill_attention`'s rules has weight
    0. Spans are not explicit."""
    if choose(implementation, k_pages) == "triton":
        from looseleaf.ops.attention_received.kernel import attention_received_triton

        return attention_received_triton(readers, k_pages, spans, num_keys, rotation, rule)
    return attention_received_reference(readers, k_pages, spans, num_keys, rotation, rule)

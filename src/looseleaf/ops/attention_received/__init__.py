"""Largest attention weight that stored keys receive from a set of rows.

Blending uses it to select the tokens to recompute."""

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
    """Largest weight of each key over all rows and heads, fp32 ``[num_keys]``.

    Keys are those of ``spans``, one span after another; rows are those of ``spans`` too. The weight
    is ``readers.weight * exp(score - readers.lse)``, and 0 for a key that the row does not see by
    the rules of `prefill_attention`. Keys at true positions >= ``readers.before`` count 0. Explicit
    spans are not supported. Raises InvalidOption for an unknown ``implementation``."""
    chosen = choose(implementation, k_pages, cpu="cpu")
    if chosen == "triton":
        from looseleaf.ops.attention_received.kernel import attention_received_triton

        return attention_received_triton(readers, k_pages, spans, num_keys, rotation, rule)
    if chosen == "cpu":
        from looseleaf.ops.attention_received.cpu import attention_received_cpu

        return attention_received_cpu(readers, k_pages, spans, num_keys, rotation, rule)
    return attention_received_reference(readers, k_pages, spans, num_keys, rotation, rule)

"""The attention that stored keys receive from some rows: who is read, and how much.

Blending asks it of the rows that tell which tokens matter. There is no kernel yet: the reference
runs wherever its tensors are."""

from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.attention_received.reference import attention_received_reference
from looseleaf.ops.prefill_attention.span_list import SpanList
from looseleaf.types import AttnState, Rotation, ScoreRule

__all__ = ["attention_received"]


def attention_received(
    q: Float[Tensor, "rows qo_heads head_dim"],
    state: AttnState,
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    spans: SpanList,
    readers: Int[Tensor, "2 rows"] | Float[Tensor, "2 rows"],
    rotation: Rotation,
    rule: ScoreRule,
) -> Float[Tensor, " keys"]:
    """For each key of ``spans``, one span after another, the largest weight of it in any row and
    head, fp32.

    ``q`` is unrotated; ``state`` is what attention over *all* keys of the rows gave, of which the
    lse is used. ``readers[0]`` is the factor of each row; of ``readers[1]`` only keys that truly
    stand before that position count. What a row does not see by `prefill_attention`'s rules has
    weight 0. Spans are not explicit."""
    return attention_received_reference(q, state, k_pages, spans, readers, rotation, rule)

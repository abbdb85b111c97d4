"""Attention sinks: one more key per row and head, with a learned logit and the value 0.

A sink is the state ``(0, sink)``, which enters the merge of a row once (GPT-OSS, arXiv 2508.10925
section 2.1.2). The key sets of a row may be grouped, selected or in other memory: only the final
state changes."""

from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.add_sinks.reference import add_sinks_reference
from looseleaf.ops.dispatch import Implementation, choose
from looseleaf.types import AttnState

__all__ = ["add_sinks"]


def add_sinks(
    state: AttnState,
    sinks: Float[Tensor, " qo_heads"],
    implementation: Implementation = "auto",
) -> AttnState:
    """Merges the state ``(0, sinks[head])`` into every row of ``state``, in place.

    ``out = out * sigmoid(lse - sink)`` and ``lse = log(exp(lse) + exp(sink))``. ``state.out`` is
    ``[rows, qo_heads, head_dim]``, ``state.lse`` ``[rows, qo_heads]``, ``sinks`` fp32. A row
    without keys gets ``(0, sink)``; its ``out`` may be undefined. An lse of NaN makes the row NaN.
    Returns ``state``. Raises InvalidOption for an unknown ``implementation``."""
    if choose(implementation, state.lse) == "triton":
        from looseleaf.ops.add_sinks.kernel import add_sinks_triton

        return add_sinks_triton(state, sinks)
    return add_sinks_reference(state, sinks)

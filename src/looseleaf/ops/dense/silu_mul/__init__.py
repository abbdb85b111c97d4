"""The gated activation of an MLP, from the product that computes gate and up together."""

from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.dense.silu_mul.reference import silu_mul_reference
from looseleaf.ops.dispatch import Implementation, choose


def silu_mul(
    gate_up: Float[Tensor, "rows twice_features"], implementation: Implementation = "auto"
) -> Float[Tensor, "rows features"]:
    """``silu(gate) * up`` of ``gate_up = [gate, up]``: fp32 inside, rounded once to the input's
    dtype.

    Rows are contiguous. Raises InvalidOption for an unknown ``implementation``."""
    if choose(implementation, gate_up) == "triton":
        from looseleaf.ops.dense.silu_mul.kernel import silu_mul_triton

        return silu_mul_triton(gate_up)
    return silu_mul_reference(gate_up)

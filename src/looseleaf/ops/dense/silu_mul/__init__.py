"""The gated activation of an MLP, from the one product that computes gate and up side by side."""

from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.dense.silu_mul.reference import silu_mul_reference
from looseleaf.ops.dispatch import Implementation, choose


def silu_mul(
    gate_up: Float[Tensor, "rows twice_features"], implementation: Implementation = "auto"
) -> Float[Tensor, "rows features"]:
    """``silu(gate) * up`` of ``gate_up = [gate, up]``, in fp32, rounded once; rows contiguous."""
    if choose(implementation, gate_up) == "triton":
        from looseleaf.ops.dense.silu_mul.kernel import silu_mul_triton

        return silu_mul_triton(gate_up)
    return silu_mul_reference(gate_up)

"""The equation of `looseleaf.ops.dense.silu_mul`."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


def silu_mul_reference(
    gate_up: Float[Tensor, "rows twice_features"],
) -> Float[Tensor, "rows features"]:
    """``silu(gate) * up`` with ``silu(x) = x / (1 + exp(-x))``."""
    wide = gate_up.double() if gate_up.dtype.itemsize == 8 else gate_up.float()
    gate, up = wide.chunk(2, -1)
    return (functional.silu(gate) * up).to(gate_up.dtype)

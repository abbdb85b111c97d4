"""The equation of `looseleaf.ops.dense.gated_linear`."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


def gated_linear_reference(
    x: Float[Tensor, "rows inner"], weight: Float[Tensor, "twice_features inner"]
) -> Float[Tensor, "rows features"]:
    """``silu`` of the first half of the product, times the second half."""
    # fp64 stays fp64, narrower dtypes become fp32
    wide, matrix = (t.double() if t.dtype.itemsize == 8 else t.float() for t in (x, weight))
    gate, up = (wide @ matrix.T).chunk(2, -1)
    return (functional.silu(gate) * up).to(x.dtype)

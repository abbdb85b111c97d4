"""The equations of `looseleaf.ops.dense.split_linear`."""

import torch
from jaxtyping import Float
from torch import Tensor


def split_linear_reference(
    x: Float[Tensor, "rows inner"], weight: Float[Tensor, "features inner"], parts: int
) -> Float[Tensor, "parts rows features"]:
    """The fp32 product of every part."""
    pairs = zip(x.float().chunk(parts, 1), weight.float().chunk(parts, 1), strict=True)
    return torch.stack([rows @ matrix.T for rows, matrix in pairs])


def whole_linear_reference(
    x: Float[Tensor, "rows inner"], weight: Float[Tensor, "features inner"]
) -> Float[Tensor, "rows features"]:
    """The product, summed in fp32."""
    return (x.float() @ weight.float().T).to(x.dtype)

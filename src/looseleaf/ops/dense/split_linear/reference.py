"""What `looseleaf.ops.dense.split_linear` means."""

import torch
from jaxtyping import Float
from torch import Tensor


def split_linear_reference(
    x: Float[Tensor, "rows inner"], weight: Float[Tensor, "features inner"], parts: int
) -> Float[Tensor, "parts rows features"]:
    """Every part's product, in fp32."""
    pairs = zip(x.float().chunk(parts, 1), weight.float().chunk(parts, 1), strict=True)
    return torch.stack([some @ rest.T for some, rest in pairs])


def whole_linear_reference(
    x: Float[Tensor, "rows inner"], weight: Float[Tensor, "features inner"]
) -> Float[Tensor, "rows features"]:
    """The product, summed in fp32."""
    return (x.float() @ weight.float().T).to(x.dtype)

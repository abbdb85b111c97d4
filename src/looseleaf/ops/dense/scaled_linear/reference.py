"""The equations of `looseleaf.ops.dense.scaled_linear`."""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

if TYPE_CHECKING:
    from looseleaf.ops.dense.scaled_linear import ScaledMatrix


def dequantize_reference(matrix: "ScaledMatrix") -> Float[Tensor, "features columns"]:
    """``(code - zero) * scale`` in fp32."""
    codes = matrix.codes
    if matrix.kind == "int4":
        # a tile has its low halves first
        pairs = codes.unflatten(1, (-1, 64))
        codes = torch.stack([pairs & 15, pairs >> 4], 2).flatten(1)
    grouped = codes.float().unflatten(1, (matrix.scales.shape[1], -1))
    if matrix.zeros is not None:
        grouped = grouped - matrix.zeros[..., None]
    values: Tensor = grouped * matrix.scales[..., None]
    return values.flatten(1)


def scaled_linear_reference(
    x: Float[Tensor, "rows columns"], matrix: "ScaledMatrix"
) -> Float[Tensor, "rows features"]:
    """``x @ weight.T`` in fp32, rounded once."""
    return (x.float() @ dequantize_reference(matrix).T).to(x.dtype)

"""The equations of `looseleaf.ops.dense.plane_linear`: values of planes, and their product."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

if TYPE_CHECKING:
    from looseleaf.ops.dense.plane_linear import PlaneMatrix


def dequantize_planes_reference(matrix: "PlaneMatrix") -> Float[Tensor, "features columns"]:
    """``scale * (code - zero) + min`` in fp32."""
    layout = matrix.layout
    scales, mins = _parameters(matrix)
    codes = _codes(matrix).float().view(*scales.shape, layout.sub) - layout.zero
    values: Tensor = scales[:, :, None] * codes
    if mins is not None:
        values += mins[:, :, None]
    return values.flatten(1)


def plane_linear_reference(
    x: Float[Tensor, "rows columns"], matrices: Sequence["PlaneMatrix"]
) -> Float[Tensor, "rows features"]:
    """``x @ weight.T`` in fp32, rounded once."""
    weight = torch.cat([dequantize_planes_reference(matrix) for matrix in matrices])
    return (x.float() @ weight.T).to(x.dtype)


def _codes(matrix: "PlaneMatrix") -> Tensor:
    """Codes ``[features, columns]`` from 0."""
    bits, codes = matrix.layout.bits, matrix.codes
    if bits == 8:
        return codes
    units = codes.unflatten(1, (-1, 32))
    codes = torch.cat([units & 15, units >> 4], 2)
    if matrix.high is not None:
        shifts = torch.arange(0, 8, bits - 4, dtype=torch.uint8, device=codes.device)[:, None]
        # a unit has 8 bytes for each further bit
        bytes_of_units = matrix.high.unflatten(1, (-1, 1, 8 * (bits - 4)))
        upper = bytes_of_units >> shifts & ((1 << (bits - 4)) - 1)
        codes = codes | upper.flatten(2) << 4
    return codes.flatten(1)


def _parameters(matrix: "PlaneMatrix") -> tuple[Tensor, Tensor | None]:
    """Scales and mins ``[features, sub-blocks]``, fp32."""
    layout, words = matrix.layout, matrix.words.t().contiguous()
    tops = None if matrix.tops is None else matrix.tops.t().contiguous().view(torch.float16).float()
    if layout.block == layout.sub:
        return words.view(torch.float16).float(), tops
    assert tops is not None, "blocks of 256 columns have scales"
    scale, least = tops.view(len(words), -1, 2, 1).unbind(2)
    blocks = len(words), scale.shape[1]
    if not layout.has_min:
        return (scale * words.view(torch.int8).view(*blocks, -1).float()).flatten(1), None
    codes = words.view(torch.uint8).view(*blocks, -1, 4).float()
    scales, mins = (codes[..., part].flatten(2) for part in (slice(0, 2), slice(2, 4)))
    return (scale * scales).flatten(1), -(least * mins).flatten(1)

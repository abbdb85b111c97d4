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
    layout, tops = matrix.layout, None
    if matrix.tops is not None:
        tops = _numbers_of(matrix.tops, torch.float16)
    if layout.block == layout.sub:
        return _numbers_of(matrix.words, torch.float16), tops
    assert tops is not None, "blocks of 256 columns have scales"
    scale, least = tops.unflatten(1, (-1, 2, 1)).unbind(2)
    if not layout.has_min:
        codes = _numbers_of(matrix.words, torch.int8).unflatten(1, (scale.shape[1], -1))
        return (scale * codes).flatten(1), None
    codes = _numbers_of(matrix.words, torch.uint8).unflatten(1, (scale.shape[1], -1, 4))
    scales, mins = codes[..., :2].flatten(2), codes[..., 2:].flatten(2)
    return (scale * scales).flatten(1), -(least * mins).flatten(1)


def _numbers_of(words: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers ``[features, numbers]`` in the bytes of ``words``, fp32."""
    flat = words.t().contiguous().flatten().view(dtype)
    return flat.float().view(words.shape[1], -1)

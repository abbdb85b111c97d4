"""The one matrix product of a decoder, and the layout its matrix is kept in.

On x86 CPUs oneDNN multiplies up to three times faster by a matrix that was brought into its own
layout once than by a plain one, from one row to thousands. So matrices are packed when they are
loaded; everything else about them stays the same.

For every number of rows it has not seen oneDNN makes a program of its own: some milliseconds and
hundreds of KiB each. So rows are padded to a few numbers, or a server would go on compiling.
"""

import platform
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Projection(NamedTuple):
    """A linear map: ``weight [out_features, in_features]``, plain or packed, and a bias or None."""

    weight: Tensor
    bias: Tensor | None = None


def project(hidden: Tensor, projection: Projection) -> Tensor:
    """``hidden @ weight.T + bias``."""
    weight, bias = projection
    if weight.is_mkldnn:
        fused = torch.ops.mkldnn._linear_pointwise
        padded = _pad(hidden)
        product: Tensor = fused(padded, weight, bias, "none", [], "")
        return product if padded is hidden else product[: hidden.shape[0]]
    return functional.linear(hidden, weight, bias)


def add_project(residual: Tensor, hidden: Tensor, projection: Projection) -> Tensor:
    """``residual + hidden @ weight.T + bias``, with the sum inside the product."""
    weight, bias = projection
    if weight.is_mkldnn:
        fused = torch.ops.mkldnn._linear_pointwise.binary
        padded = _pad(hidden)
        if padded is hidden:
            summed: Tensor = fused(hidden, residual, weight, bias, "add")
            return summed
        summed = fused(padded, _pad(residual), weight, bias, "add")
        return summed[: hidden.shape[0]]
    summed = torch.addmm(residual, hidden, weight.t())
    return summed if bias is None else summed.add_(bias)


def add_project_(residual: Tensor, hidden: Tensor, projection: Projection) -> Tensor:
    """The same for plain matrices, written over ``residual``."""
    weight, bias = projection
    residual.addmm_(hidden, weight.t())
    return residual if bias is None else residual.add_(bias)


def padded_rows(rows: int) -> int:
    """The number of rows that a packed product is computed with: few up to 64, then every 32nd."""
    step = 1 if rows <= 8 else 8 if rows <= 64 else 32
    return -(-rows // step) * step


def _pad(hidden: Tensor) -> Tensor:
    # not len(): that is a call in Python, and this one is made a hundred times a step
    rows = hidden.shape[0]
    missing = padded_rows(rows) - rows
    return functional.pad(hidden, (0, 0, 0, missing)) if missing else hidden


def pack(projection: Projection) -> Projection:
    """``projection`` with a packed copy of its matrix, if ``can_pack`` says so; else itself."""
    weight = projection.weight
    if not can_pack(weight.dtype, weight.device):
        return projection
    return Projection(torch.ops.mkldnn._reorder_linear_weight(weight), projection.bias)


def unpack(weight: Tensor) -> Tensor:
    """A matrix in the plain layout, whichever it is kept in."""
    return weight.to_dense() if weight.is_mkldnn else weight


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build and machine have the packed product; measured gains are for x86 only."""
    if device.type != "cpu" or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    if not (
        torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32

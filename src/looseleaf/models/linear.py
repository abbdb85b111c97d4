"""The matrix product of a decoder: plain, quantized, or in a packed layout on x86 CPUs.

oneDNN multiplies up to three times faster by a matrix in its own layout. So matrices are packed
when they are loaded.

oneDNN compiles a program for each new number of rows, which costs milliseconds and hundreds of KiB.
So rows are padded to a few sizes.
"""

import platform
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from looseleaf.models.quantized import QuantizedWeight

# up to this number of rows no row is padded
_FEW_ROWS = 8


class Projection(NamedTuple):
    """A linear map: ``weight [out_features, in_features]`` and a bias or None.

    A tensor is plain or packed. The bias of a quantized weight is fp32."""

    weight: Tensor | QuantizedWeight
    bias: Tensor | None = None


def project(hidden: Tensor, projection: Projection) -> Tensor:
    """``hidden @ weight.T + bias``."""
    weight, bias = projection
    if isinstance(weight, QuantizedWeight):
        return weight.multiply(hidden, bias)
    if not weight.is_mkldnn:
        return functional.linear(hidden, weight, bias)
    # len() is slower, and a step calls this a hundred times
    rows = hidden.shape[0]
    padded = hidden if rows <= _FEW_ROWS else _pad(hidden)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(padded, weight, bias, "none", [], "")
    return product if padded is hidden else product[:rows]


def add_project(residual: Tensor, hidden: Tensor, projection: Projection) -> Tensor:
    """``residual + hidden @ weight.T + bias``, with the sum inside the product."""
    weight, bias = projection
    if isinstance(weight, QuantizedWeight):
        return weight.multiply(hidden, bias, residual)
    if not weight.is_mkldnn:
        summed = torch.addmm(residual, hidden, weight.t())
        return summed if bias is None else summed.add_(bias)
    rows = hidden.shape[0]
    padded = hidden if rows <= _FEW_ROWS else _pad(hidden)
    residual = residual if padded is hidden else _pad(residual)
    added: Tensor = torch.ops.mkldnn._linear_pointwise.binary(padded, residual, weight, bias, "add")
    return added if padded is hidden else added[:rows]


def add_project_(residual: Tensor, hidden: Tensor, projection: Projection) -> Tensor:
    """As `add_project`; overwrites ``residual`` if the matrix is plain."""
    weight, bias = projection
    if isinstance(weight, QuantizedWeight):
        return weight.multiply(hidden, bias, residual)
    residual.addmm_(hidden, weight.t())
    return residual if bias is None else residual.add_(bias)


def padded_rows(rows: int) -> int:
    """``rows`` rounded up to a multiple of 8 up to 64, else of 32; unchanged up to 8."""
    step = 1 if rows <= _FEW_ROWS else 8 if rows <= 64 else 32
    return -(-rows // step) * step


def _pad(hidden: Tensor) -> Tensor:
    missing = padded_rows(hidden.shape[0]) - hidden.shape[0]
    return functional.pad(hidden, (0, 0, 0, missing)) if missing else hidden


def look_up(weight: Tensor | QuantizedWeight, rows: Tensor) -> Tensor:
    """Rows of ``weight`` by number."""
    return weight.rows(rows) if isinstance(weight, QuantizedWeight) else weight[rows]


def pack(projection: Projection) -> Projection:
    """``projection`` with a packed copy of its matrix if `can_pack`, else unchanged."""
    weight = projection.weight
    if isinstance(weight, QuantizedWeight) or not can_pack(weight.dtype, weight.device):
        return projection
    return Projection(torch.ops.mkldnn._reorder_linear_weight(weight), projection.bias)


def unpack(weight: Tensor | QuantizedWeight) -> Tensor:
    """``weight`` in the plain layout, dequantized."""
    if isinstance(weight, QuantizedWeight):
        return weight.dequantize()
    return weight.to_dense() if weight.is_mkldnn else weight


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build and machine support the packed product; only x86 gains by it."""
    if device.type != "cpu" or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    if not (
        torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32

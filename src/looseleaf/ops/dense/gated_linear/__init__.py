"""The first half of a gated MLP, fused: both products, the activation and the multiplication.

Products of few rows are bound by the read of their matrix, and a separate activation kernel would
leave memory idle before and after it. Products of many rows would write and read three times the
data for a separate activation."""

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.dense.gated_linear.reference import gated_linear_reference
from looseleaf.ops.dispatch import Implementation, choose

MAX_FEW = 64
"""Most rows of the kernel in which a program has all rows, and the matrix is the second operand."""
MAX_SEVERAL = 192
"""Most rows of the kernel in which a program has all rows, and the matrix is the first operand.

More rows use tiles of 128 rows."""

FEATURES, FEATURES_OF_MANY, INNER = 64, 128, 64
"""Outputs of gate per tile for few rows and for more rows, and inner dims per tile."""


def _is_quicker(rows: int, tiles: int, device: torch.device) -> bool:
    """Whether the kernel is faster than product, activation and multiplication.

    Between 257 and 1,023 rows its tiles fill the SMs badly."""
    if rows <= MAX_FEW:
        return True
    if rows <= MAX_SEVERAL:
        return 2 * tiles >= torch.cuda.get_device_properties(device).multi_processor_count
    return rows <= 256 or rows >= 1024


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels support ``x`` and ``weight``: 16 bits on Hopper, with whole tiles."""
    tile = FEATURES if x.shape[0] <= MAX_FEW else FEATURES_OF_MANY
    return (
        x.is_cuda
        and torch.cuda.get_device_capability(x.device)[0] == 9
        and x.itemsize == 2
        and x.dtype == weight.dtype
        and weight.shape[0] % (2 * tile) == 0
        and weight.shape[1] % INNER == 0
        and weight.is_contiguous()
    )


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether a kernel `fits` and is the faster choice."""
    tiles = weight.shape[0] // (2 * FEATURES_OF_MANY)
    return fits(x, weight) and _is_quicker(x.shape[0], tiles, x.device)


def gated_linear(
    x: Float[Tensor, "rows inner"],
    weight: Float[Tensor, "twice_features inner"],
    implementation: Implementation = "auto",
) -> Float[Tensor, "rows features"]:
    """``silu(x @ gate.T) * (x @ up.T)`` of ``weight = [gate, up]``: fp32 inside, rounded once.

    The result has the dtype of ``x``. Rows are contiguous; the kernels require `fits`. Raises
    InvalidOption for an unknown ``implementation``."""
    if choose(implementation, x) != "triton":
        return gated_linear_reference(x, weight)
    if x.shape[0] > MAX_SEVERAL:
        from looseleaf.ops.dense.gated_many.kernel import gated_linear_many as multiply
    elif x.shape[0] > MAX_FEW:
        from looseleaf.ops.dense.gated_several.kernel import gated_linear_several as multiply
    else:
        from looseleaf.ops.dense.gated_linear.kernel import gated_linear_gluon as multiply
    return multiply(x, weight)

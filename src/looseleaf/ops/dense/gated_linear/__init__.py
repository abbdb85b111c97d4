"""The first half of a gated MLP: both products, the activation and its factor at once.

Products of few rows take as long as their matrix takes to be read, and what comes between them and
the next is a launch that waits for all of it and is waited for. Products of many rows leave three
times what they need to memory, if their activation is a launch of its own."""

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.dense.gated_linear.reference import gated_linear_reference
from looseleaf.ops.dispatch import Implementation, choose

MAX_FEW = 64
"""Up to so many rows a program has all of them, and the matrix is the second operand."""
MAX_SEVERAL = 192
"""Up to so many a program has all of them still, and the matrix is the first operand. Past it there
are tiles of 128 rows."""

FEATURES, FEATURES_OF_MANY, INNER = 64, 128, 64
"""What a tile has of gate's outputs, for few and for more rows, and of the inner dim."""


def _is_quicker(rows: int, tiles: int, device: torch.device) -> bool:
    """Whether a kernel is quicker than products, activation and factor in turn.

    Measured on an H200, 14,336 features, us: 112 rows 66 for 69, 144 rows 66.5 for 71, 192 rows 72
    for 83, 256 rows 107 for 113, 1,024 rows 373 for 387; but 512 rows 212 for 185, which fill its
    processors badly.
    """
    if rows <= MAX_FEW:
        return True
    if rows <= MAX_SEVERAL:
        return 2 * tiles >= torch.cuda.get_device_properties(device).multi_processor_count
    return rows <= 256 or rows >= 1024


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether there is a kernel for such rows and such a matrix on their device: on Hopper, in 16
    bits, where tiles fit."""
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
    """Whether a kernel `fits`, and is the quicker way."""
    tiles = weight.shape[0] // (2 * FEATURES_OF_MANY)
    return fits(x, weight) and _is_quicker(x.shape[0], tiles, x.device)


def gated_linear(
    x: Float[Tensor, "rows inner"],
    weight: Float[Tensor, "twice_features inner"],
    implementation: Implementation = "auto",
) -> Float[Tensor, "rows features"]:
    """``silu(x @ gate.T) * (x @ up.T)`` of ``weight = [gate, up]``, in fp32, rounded once.

    The kernels take what `fits` says; rows are contiguous."""
    if choose(implementation, x) == "triton" and x.shape[0] > MAX_SEVERAL:
        from looseleaf.ops.dense.gated_many.kernel import gated_linear_many

        return gated_linear_many(x, weight)
    if choose(implementation, x) == "triton" and x.shape[0] > MAX_FEW:
        from looseleaf.ops.dense.gated_several.kernel import gated_linear_several

        return gated_linear_several(x, weight)
    if choose(implementation, x) == "triton":
        from looseleaf.ops.dense.gated_linear.kernel import gated_linear_gluon

        return gated_linear_gluon(x, weight)
    return gated_linear_reference(x, weight)

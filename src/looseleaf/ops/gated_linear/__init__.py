"""The first half of a gated MLP for few rows: both products, the activation and its factor at once.

Such products take as long as their matrix takes to be read, and what comes between them and the
next is a launch that waits for all of it and is waited for."""

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.dispatch import Implementation, choose
from looseleaf.ops.gated_linear.reference import gated_linear_reference

MAX_ROWS = 64
"""More rows are not worth it: a program has them all, and multiplying takes longer than reading."""

FEATURES, INNER = 64, 64
"""What a tile has of a matrix's outputs and of its inner dim."""


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether there is a kernel for such rows and such a matrix on their device: on Hopper, in 16
    bits, where tiles fit."""
    return (
        x.is_cuda
        and torch.cuda.get_device_capability(x.device)[0] == 9
        and x.itemsize == 2
        and x.dtype == weight.dtype
        and len(x) <= MAX_ROWS
        and weight.shape[0] % (2 * FEATURES) == 0
        and weight.shape[1] % INNER == 0
        and weight.is_contiguous()
    )


def gated_linear(
    x: Float[Tensor, "rows inner"],
    weight: Float[Tensor, "twice_features inner"],
    implementation: Implementation = "auto",
) -> Float[Tensor, "rows features"]:
    """``silu(x @ gate.T) * (x @ up.T)`` of ``weight = [gate, up]``, in fp32, rounded once.

    The kernel takes what `serves` says; rows are contiguous."""
    if choose(implementation, x) == "triton":
        from looseleaf.ops.gated_linear.kernel import gated_linear_gluon

        return gated_linear_gluon(x, weight, FEATURES)
    return gated_linear_reference(x, weight)

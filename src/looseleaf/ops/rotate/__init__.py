"""Rotary position embedding (RoPE) of unrotated vectors, in fp32.

Cosines and sines come from a table (`Rotation`). Vectors are never rotated twice, from one frame to
another: rounding errors would add up (docs/frames.md)."""

from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.errors import InvalidOption
from looseleaf.ops.dispatch import Implementation, choose
from looseleaf.ops.page_dtypes import FP8
from looseleaf.ops.rotate.reference import rotate_reference
from looseleaf.types import Rotation


def rotate(
    x: Float[Tensor, "tokens heads head_dim"],
    positions: Int[Tensor, " tokens"],
    rotation: Rotation,
    implementation: Implementation = "auto",
) -> Float[Tensor, "tokens heads head_dim"]:
    """``x`` with the heads of each token rotated to its position, in the dtype of ``x``.

    Dims after ``rotary_dim`` are copied. ``positions`` are int32 or int64 in ``[0, table length)``;
    ``x`` may have any strides. Raises InvalidOption for e4m3, which is too coarse to rotate, and on
    a CPU for positions outside the table."""
    if x.dtype is FP8:
        raise InvalidOption("e4m3 is a page dtype: rotate a vector before it is stored")
    if choose(implementation, x) == "triton":
        from looseleaf.ops.rotate.kernel import rotate_triton

        return rotate_triton(x, positions, rotation)
    return rotate_reference(x, positions, rotation)

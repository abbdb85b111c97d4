"""Turn vectors by the angle of their position (RoPE), from the unrotated vector, in fp32.

Angles come from a table (`Rotation`); the result has the dtype of the input. Never rotate an
already rotated vector from one frame to the next: rounding adds up (docs/frames.md)."""

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
    """``x`` with each token's heads turned to its position; dims past ``rotary_dim`` are copied.

    ``positions`` are int32 or int64 in ``[0, table length)``; strides of ``x`` are free. Raises
    InvalidOption for positions outside (the kernel does not look), and for e4m3, which is what
    pages hold and too coarse to turn.
    """
    if x.dtype is FP8:
        raise InvalidOption("e4m3 is for pages: turn a vector before it is stored, or widen it")
    if choose(implementation, x) == "triton":
        from looseleaf.ops.rotate.kernel import rotate_triton

        return rotate_triton(x, positions, rotation)
    return rotate_reference(x, positions, rotation)

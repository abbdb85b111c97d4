"""Turn vectors by the angle of their position (RoPE), from the unrotated vector, in fp32.

Angles come from a table (`Rotation`); the result has the dtype of the input. Never rotate an
already rotated vector from one frame to the next: rounding adds up (notes: bf16 tables err by
2e-3)."""

from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.dispatch import Implementation, choose
from looseleaf.ops.rotate.reference import rotate_reference
from looseleaf.types import Rotation


def rotate(
    x: Float[Tensor, "tokens heads head_dim"],
    positions: Int[Tensor, " tokens"],
    rotation: Rotation,
    implementation: Implementation = "auto",
) -> Float[Tensor, "tokens heads head_dim"]:
    """``x`` with each token's heads turned to its position; dims past ``rotary_dim`` are copied.

    ``positions`` are int32 or int64 in ``[0, table length)``; strides of ``x`` are free.
    """
    if choose(implementation, x) == "triton":
        from looseleaf.ops.rotate.kernel import rotate_triton

        return rotate_triton(x, positions, rotation)
    return rotate_reference(x, positions, rotation)

"""RMS norm of the residual stream, with what a layer adds to the stream summed in the same launch.

The sum is rounded to the dtype of the stream before it is normed, as if it were stored in between:
so the fused operator equals an addition followed by a norm."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.dense.rms_norm.reference import rms_norm_reference
from looseleaf.ops.dispatch import Implementation, choose


class NormedStream(NamedTuple):
    """The norm's result and the stream it was taken of, both ``[rows, features]``."""

    normed: Tensor
    stream: Tensor


def rms_norm(
    stream: Float[Tensor, "rows features"],
    weight: Float[Tensor, " features"],
    eps: float,
    delta: Float[Tensor, "*parts rows features"] | None = None,
    implementation: Implementation = "auto",
) -> NormedStream:
    """``weight * x / sqrt(mean(x²) + eps)`` of ``x = stream + delta``, computed in fp32.

    With a ``delta`` the sum is written to ``stream``, in place, and returned as the new stream. A
    delta may come in parts, as `looseleaf.ops.dense.split_linear` leaves it, and then in fp32, and
    the weight may be fp32; otherwise all tensors have one dtype. Rows are contiguous.
    """
    if choose(implementation, stream) == "triton":
        from looseleaf.ops.dense.rms_norm.kernel import rms_norm_triton

        return NormedStream(rms_norm_triton(stream, weight, eps, delta), stream)
    return NormedStream(rms_norm_reference(stream, weight, eps, delta), stream)

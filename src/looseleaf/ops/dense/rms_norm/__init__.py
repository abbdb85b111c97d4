"""RMS norm of the residual stream, fused with the addition of a layer's output to the stream.

The sum is rounded to the stream's dtype before the norm. The operator therefore equals an addition
followed by a norm."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.dense.rms_norm.native import rms_norm_native
from looseleaf.ops.dense.rms_norm.reference import rms_norm_reference
from looseleaf.ops.dispatch import Implementation, choose


class NormedStream(NamedTuple):
    """The norm's result and the stream after the addition, both ``[rows, features]``."""

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

    ``stream`` is updated in place to ``x``. ``delta`` may have a leading dim of parts, which are
    summed too (`looseleaf.ops.dense.split_linear`); parts are fp32. ``weight`` may be fp32; all
    other tensors have the stream's dtype. Rows are contiguous. ``native`` sums no parts. Raises
    InvalidOption for an unknown ``implementation``, and NativeUnavailable without a C compiler."""
    chosen = choose(implementation, stream, native=True)
    if chosen == "native":
        return NormedStream(rms_norm_native(stream, weight, eps, delta), stream)
    if chosen == "triton":
        from looseleaf.ops.dense.rms_norm.kernel import rms_norm_triton

        return NormedStream(rms_norm_triton(stream, weight, eps, delta), stream)
    return NormedStream(rms_norm_reference(stream, weight, eps, delta), stream)

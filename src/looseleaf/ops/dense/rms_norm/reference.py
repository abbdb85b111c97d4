"""What `looseleaf.ops.dense.rms_norm` means."""

from jaxtyping import Float
from torch import Tensor


def rms_norm_reference(
    stream: Float[Tensor, "rows features"],
    weight: Float[Tensor, " features"],
    eps: float,
    delta: Float[Tensor, "*parts rows features"] | None = None,
) -> Float[Tensor, "rows features"]:
    """The norm of the sum, which replaces ``stream``."""
    if delta is not None:
        stream += delta if delta.ndim == 2 else delta.sum(0)
    # fp64 stays fp64, everything narrower is widened
    x = stream.double() if stream.dtype.itemsize == 8 else stream.float()
    scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (x * scale * weight).to(stream.dtype)

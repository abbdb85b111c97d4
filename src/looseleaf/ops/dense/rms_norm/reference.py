"""The equation of `looseleaf.ops.dense.rms_norm`."""

from jaxtyping import Float
from torch import Tensor


def rms_norm_reference(
    stream: Float[Tensor, "rows features"],
    weight: Float[Tensor, " features"],
    eps: float,
    delta: Float[Tensor, "*parts rows features"] | None = None,
) -> Float[Tensor, "rows features"]:
    """See `looseleaf.ops.dense.rms_norm`; updates ``stream`` in place."""
    if delta is not None:
        stream += delta if delta.ndim == 2 else delta.sum(0)
    # fp64 stays fp64, narrower dtypes become fp32
    x = stream.double() if stream.dtype.itemsize == 8 else stream.float()
    scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (x * scale * weight).to(stream.dtype)

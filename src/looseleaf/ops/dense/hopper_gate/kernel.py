"""What becomes of the gated products on Hopper, however many rows they have."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from looseleaf.ops.scores.kernel import LOG2_E


@gluon.jit
def gated(gate, up):
    """``silu(gate) * up``, in the dtype and the layout of both."""
    # the exponential of what is not positive can't overflow
    decay = gl.exp2(-gl.abs(gate) * LOG2_E)
    share = gl.where(gate < 0, decay, 1.0) / (1.0 + decay)
    return gate * share * up

"""The gated activation on Hopper, shared by the kernels of all row counts."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from looseleaf.ops.scores.kernel import LOG2_E


@gluon.jit
def gated(gate, up):
    """``silu(gate) * up``, in the dtype and layout of both."""
    # exp2 of a number <= 0 cannot overflow
    decay = gl.exp2(-gl.abs(gate) * LOG2_E)
    share = gl.where(gate < 0, decay, 1.0) / (1.0 + decay)
    return gate * share * up

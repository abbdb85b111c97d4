"""Device functions of the Hopper kernel: which of the two computing groups multiplies next.

They begin their products one after the other, as those of FlashAttention-3 do (section 3.1): one
multiplies while the other takes exponentials. Left to themselves they go in step behind every
border of spans, where both wait for the same things; then both multiply, or neither. Every begin
wants one leave by the other group, the first of all one ahead.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _at_barrier(INSTRUCTION: gl.constexpr):
    """An instruction at one of the hardware's barriers, by every thread of a group."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    nothing = gl.zeros([128], gl.int32, layout=LAYOUT)
    gl.inline_asm_elementwise(
        INSTRUCTION + " mov.b32 $0, $1;", "=r,r", [nothing], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def begin_products(WORKER: gl.constexpr):
    """Wait until the other group has left the products to this one."""
    # the compiler gives the 16 barriers out from 0 on, and takes a few
    if WORKER == 0:
        _at_barrier("bar.sync 14, 256;")
    else:
        _at_barrier("bar.sync 15, 256;")


@gluon.jit
def leave_products(WORKER: gl.constexpr):
    """Leave the next products to the other group: those of this one have begun."""
    if WORKER == 0:
        _at_barrier("bar.arrive 15, 256;")
    else:
        _at_barrier("bar.arrive 14, 256;")

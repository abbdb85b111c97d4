"""Device functions of the Hopper kernel: what is agreed on at the hardware's barriers, that is
which of the two computing groups multiplies next, and which tiles have been read.

The groups begin their products one after the other, as those of FlashAttention-3 do (section 3.1):
one multiplies while the other takes exponentials. Left to themselves they go in step behind every
border of spans, where both wait for the same things; then both multiply, or neither. Every begin
wants one leave by the other group, the first of all one ahead.

A tile is given back by every warp for itself. Were it one thread that speaks for its group, the
group would have to meet first, and the compiler has it meet again wherever such a thread arrives.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# of the hardware's 16 barriers the compiler gives out the first few: tiles take those from 8 on,
# and the order of two groups, which have rings of three tiles, the last two
_TILES, _ORDER = gl.constexpr(8), gl.constexpr(14)


@gluon.jit
def _at_barrier(INSTRUCTION: gl.constexpr, number, WARPS: gl.constexpr):
    """An instruction at one of the hardware's barriers, $1 being a number, by every thread of as
    many warps."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    given = gl.full([WARPS * 32], number, gl.int32, layout=LAYOUT)
    gl.inline_asm_elementwise(
        INSTRUCTION + " mov.b32 $0, $1;", "=r,r", [given], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def begin_products(WORKER: gl.constexpr):
    """Wait until the other group has left the products to this one."""
    _at_barrier("bar.sync $1, 256;", _ORDER + WORKER, 4)


@gluon.jit
def leave_products(WORKER: gl.constexpr):
    """Leave the next products to the other group: those of this one have begun."""
    _at_barrier("bar.arrive $1, 256;", _ORDER + 1 - WORKER, 4)


@gluon.jit
def give_back(stage, SIDE: gl.constexpr, STAGES: gl.constexpr, WORKERS: gl.constexpr):
    """This group has read a tile of the ring of keys (``SIDE`` 0) or of values (1), and says so to
    the warp that fills it. Tiles that nobody waits for any more are given back as well."""
    gl.static_assert((6 if WORKERS == 2 else 8) >= 2 * STAGES, "more tiles than barriers")
    number = _TILES + SIDE * STAGES + stage
    if WORKERS == 2:
        _at_barrier("bar.arrive $1, 288;", number, 4)
    else:
        _at_barrier("bar.arrive $1, 160;", number, 4)


@gluon.jit
def await_back(stage, SIDE: gl.constexpr, STAGES: gl.constexpr, WORKERS: gl.constexpr):
    """Wait until every group has given a tile back: once before each time that it is filled again,
    not before the first."""
    number = _TILES + SIDE * STAGES + stage
    if WORKERS == 2:
        _at_barrier("bar.sync $1, 288;", number, 1)
    else:
        _at_barrier("bar.sync $1, 160;", number, 1)

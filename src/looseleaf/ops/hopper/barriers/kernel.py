"""Named barriers of the Hopper kernel: the order of the two consumer warpgroups, and free tiles.

The warpgroups alternate on the tensor cores (ping-pong scheduling, FlashAttention-3, section 3.1):
one multiplies while the other computes exponentials. Without the order, both wait for the same tile
at every border of spans and then run in step. Every `acquire_tensor_cores` needs one
`yield_tensor_cores` of the other warpgroup; the first warpgroup yields once before the loop.

Every warp releases a tile on its own. A release by one thread per warpgroup would need a barrier of
the warpgroup first."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# named barriers 0 to 15: the compiler uses the first few, tiles use those from 8 on, and the order
# of two warpgroups, which have rings of three tiles, the last two
_TILES, _ORDER = gl.constexpr(8), gl.constexpr(14)


@gluon.jit
def _at_barrier(INSTRUCTION: gl.constexpr, number, WARPS: gl.constexpr):
    """Runs a named-barrier instruction in all threads of ``WARPS`` warps; $1 is the barrier's
    number."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    numbers = gl.full([WARPS * 32], number, gl.int32, layout=LAYOUT)
    gl.inline_asm_elementwise(
        INSTRUCTION + " mov.b32 $0, $1;", "=r,r", [numbers], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def acquire_tensor_cores(CONSUMER: gl.constexpr):
    """Waits until the other warpgroup yields the tensor cores."""
    _at_barrier("bar.sync $1, 256;", _ORDER + CONSUMER, 4)


@gluon.jit
def yield_tensor_cores(CONSUMER: gl.constexpr):
    """Yields the tensor cores to the other warpgroup, after the products of this one are issued."""
    _at_barrier("bar.arrive $1, 256;", _ORDER + 1 - CONSUMER, 4)


@gluon.jit
def release_tile(stage, SIDE: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Releases a tile of the ring of keys (``SIDE`` 0) or values (1) to its producer warp.

    Tiles that are not filled again are released too."""
    gl.static_assert((6 if CONSUMERS == 2 else 8) >= 2 * STAGES, "more tiles than barriers")
    number = _TILES + SIDE * STAGES + stage
    if CONSUMERS == 2:
        _at_barrier("bar.arrive $1, 288;", number, 4)
    else:
        _at_barrier("bar.arrive $1, 160;", number, 4)


@gluon.jit
def await_release(stage, SIDE: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Waits until every consumer warpgroup releases a tile; not called before the first fill."""
    number = _TILES + SIDE * STAGES + stage
    if CONSUMERS == 2:
        _at_barrier("bar.sync $1, 288;", number, 1)
    else:
        _at_barrier("bar.sync $1, 160;", number, 1)

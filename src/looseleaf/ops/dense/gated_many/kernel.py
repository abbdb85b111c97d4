"""The gated products of many rows on Hopper: persistent programs with a producer warp and two
consumers.

Each consumer warpgroup multiplies 64 rows by 128 outputs of gate and of up. Gate and up are one
product of 256 outputs, whose halves are in the same threads: the activation needs no memory. While
one warpgroup computes the activation, the other uses the tensor cores, since the producer is tiles
ahead of both."""

import torch
from jaxtyping import Float
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from looseleaf.ops.dense.hopper_gate.kernel import gated
from looseleaf.ops.hopper.fetch.kernel import load_tile
from looseleaf.ops.hopper.tiles.kernel import ROWS, wait_for_group

# the width of the hardware's swizzle
INNER = gl.constexpr(64)
CONSUMERS = gl.constexpr(2)
# rows of a tile, and its outputs of gate (and as many of up)
HEIGHT = gl.constexpr(128)
FEATURES = gl.constexpr(128)
STAGES = gl.constexpr(4)
# concurrent tiles form a square, so that they share the most rows and outputs
COLUMN_TILES = gl.constexpr(16)


@gluon.jit
def _tile_of(unit, row_tiles, feature_tiles):
    """Row tile and feature tile of a unit, in columns of ``COLUMN_TILES`` tiles."""
    first = unit // (COLUMN_TILES * feature_tiles) * COLUMN_TILES
    height = gl.minimum(row_tiles - first, COLUMN_TILES)
    rest = unit - first * feature_tiles
    return first + rest % height, rest // height


@gluon.jit
def _fetch(data, sizes):
    """The producer warp."""
    x_desc, w_desc, x_tiles, w_tiles, full, empty = data
    row_tiles, feature_tiles, features, num_blocks, _ = sizes
    gdc_wait()
    gdc_launch_dependents()
    count = 0
    for unit in range(gl.program_id(0), row_tiles * feature_tiles, gl.num_programs(0)):
        row_tile, feature_tile = _tile_of(unit, row_tiles, feature_tiles)
        for block in range(0, num_blocks):
            stage, phase = count % STAGES, (count // STAGES) & 1
            column, barrier = block * INNER, full.index(stage)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(barrier, (2 * FEATURES + HEIGHT) * INNER * 2)
            for consumer in gl.static_range(CONSUMERS):
                row = row_tile * HEIGHT + consumer * ROWS
                x_tile = x_tiles.index(stage * CONSUMERS + consumer)
                load_tile(x_desc, [row, column], barrier, x_tile)
            for half in gl.static_range(2):
                feature = half * features + feature_tile * FEATURES
                part = w_tiles.index(stage).slice(half * FEATURES, FEATURES, 0)
                load_tile(w_desc, [feature, column], barrier, part)
            count += 1


@gluon.jit
def _multiply(data, sizes, target, CONSUMER: gl.constexpr):
    """A consumer warpgroup: both products of its rows, and the activation."""
    _, _, x_tiles, w_tiles, full, empty = data
    row_tiles, feature_tiles, _, num_blocks, rows = sizes
    out, stride_out = target
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * FEATURES, 16])
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    count = 0
    for unit in range(gl.program_id(0), row_tiles * feature_tiles, gl.num_programs(0)):
        row_tile, feature_tile = _tile_of(unit, row_tiles, feature_tiles)
        both = gl.zeros([ROWS, 2 * FEATURES], gl.float32, layout=LAYOUT)
        for block in range(0, num_blocks):
            stage, phase = count % STAGES, (count // STAGES) & 1
            mbarrier.wait(full.index(stage), phase)
            b_x = x_tiles.index(stage * CONSUMERS + CONSUMER)
            both = warpgroup_mma(b_x, w_tiles.index(stage).permute((1, 0)), both, is_async=True)
            # the previous product is complete, so its tiles are free
            both = warpgroup_mma_wait(1, deps=[both])
            wait_for_group()
            if block > 0:
                mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)
            count += 1
        both = warpgroup_mma_wait(0, deps=[both])
        wait_for_group()
        mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)
        gate, up = gl.split(gl.permute(gl.reshape(both, [ROWS, 2, FEATURES]), [0, 2, 1]))
        value = gl.convert_layout(gated(gate, up).to(out.dtype.element_ty), STORE)
        o_m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORE))
        o_m += row_tile * HEIGHT + CONSUMER * ROWS
        o_n = feature_tile * FEATURES + gl.arange(0, FEATURES, layout=gl.SliceLayout(0, STORE))
        p_out = out + o_m.to(gl.int64)[:, None] * stride_out + o_n[None, :]
        gl.store(p_out, value, mask=(o_m < rows)[:, None] & (o_n >= 0)[None, :])


# compiled once for all numbers of rows
@gluon.jit(do_not_specialize=["rows"])
def _gated_many_kernel(x_desc, w_desc, out, rows, features, inner, stride_out):
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype = x_desc.dtype
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, ROWS, INNER], SHARED)
    w_tiles = gl.allocate_shared_memory(dtype, [STAGES, 2 * FEATURES, INNER], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    wait_for_group()
    data = (x_desc, w_desc, x_tiles, w_tiles, full, empty)
    row_tiles = (rows + HEIGHT - 1) // HEIGHT
    sizes = (row_tiles, features // FEATURES, features, inner // INNER, rows)
    gl.warp_specialize(
        [
            (_multiply, (data, sizes, (out, stride_out), 0)),
            (_multiply, (data, sizes, (out, stride_out), 1)),
            (_fetch, (data, sizes)),
        ],
        [4, 1], [232, 24],
    )  # fmt: skip


def gated_linear_many(
    x: Float[Tensor, "rows inner"], weight: Float[Tensor, "twice_features inner"]
) -> Float[Tensor, "rows features"]:
    """See `looseleaf.ops.dense.gated_linear`."""
    (rows, inner), features = x.shape, weight.shape[0] // 2
    assert features % FEATURES.value == 0 and inner % INNER.value == 0, "tiles must fit"
    assert x.stride(1) == 1 and weight.is_contiguous(), "inner dims must be contiguous"
    out = torch.empty((rows, features), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    layout = gl.NVMMASharedLayout(128, 16, 2)
    x_desc = TensorDescriptor(x, [rows, inner], [x.stride(0), 1], [ROWS.value, INNER.value], layout)
    w_desc = TensorDescriptor.from_tensor(weight, [FEATURES.value, INNER.value], layout)
    tiles = -(-rows // HEIGHT.value) * (features // FEATURES.value)
    num_sms = 1
    if x.is_cuda:
        num_sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    _gated_many_kernel[(min(tiles, num_sms),)](
        x_desc, w_desc, out, rows, features, inner, out.stride(0),
        num_warps=4, enable_fp_fusion=True, launch_pdl=True,
    )  # fmt: skip
    return out

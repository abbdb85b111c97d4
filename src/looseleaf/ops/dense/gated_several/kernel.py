"""The gated products of 65 to 192 rows on Hopper: a producer warp and two consumer warpgroups.

Each warpgroup multiplies 64 outputs of gate and of up by all rows. The matrix is the first operand:
rows then come in multiples of 16 instead of 64, and a program has all rows, so the matrix is read
once. Its first tiles are copied before the wait for the previous kernel."""

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
from looseleaf.ops.hopper.tiles.kernel import wait_for_group

# the width of the hardware's swizzle
INNER = gl.constexpr(64)
STAGES = gl.constexpr(4)
CONSUMERS = gl.constexpr(2)
# outputs of a warpgroup
OUTPUTS = gl.constexpr(64)
# outputs of gate per program, and as many of up
FEATURES = gl.constexpr(128)
# rows of the first product; the second product has the rest
MOST = gl.constexpr(128)


@gluon.jit
def _fetch_matrix(data, block, stage, REST: gl.constexpr):
    """Copies a tile of gate and one of up; the barrier also expects the rows."""
    _, _, w_desc, _, _, w_tiles, full, _, tile, features = data
    column, barrier = block * INNER, full.index(stage)
    mbarrier.expect(barrier, (2 * FEATURES + MOST + REST) * INNER * 2)
    for half in gl.static_range(2):
        row = half * features + tile * FEATURES
        load_tile(w_desc, [row, column], barrier, w_tiles.index(2 * stage + half))


@gluon.jit
def _fetch_rows(data, block, stage, REST: gl.constexpr):
    x_desc, rest_desc, _, x_tiles, rest_tiles, _, full, _, _, _ = data
    column, barrier = block * INNER, full.index(stage)
    load_tile(x_desc, [0, column], barrier, x_tiles.index(stage))
    if REST:
        load_tile(rest_desc, [MOST, column], barrier, rest_tiles.index(stage))


@gluon.jit
def _fetch(data, num_blocks, REST: gl.constexpr):
    """The producer warp."""
    empty = data[7]
    gdc_launch_dependents()
    early = gl.minimum(num_blocks, STAGES)
    for block in range(0, early):
        _fetch_matrix(data, block, block, REST)
    # the previous kernel's output may be read from here on
    gdc_wait()
    for block in range(0, early):
        _fetch_rows(data, block, block, REST)
    for block in range(early, num_blocks):
        stage, phase = block % STAGES, (block // STAGES) & 1
        mbarrier.wait(empty.index(stage), phase ^ 1)
        _fetch_matrix(data, block, stage, REST)
        _fetch_rows(data, block, stage, REST)


@gluon.jit
def _store(value, tile, target, feature, first, COUNT: gl.constexpr):
    """Stores ``value`` [outputs, COUNT rows from ``first`` on] through ``tile``, a free tile of the
    matrix.

    The tile transposes the output, so that rows are written 16 bytes at a time."""
    out, rows, stride_out = target
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    part = tile.slice(0, COUNT, 0)
    part.permute((1, 0)).store(value.to(out.dtype.element_ty))
    o_m = first + gl.arange(0, COUNT, layout=gl.SliceLayout(1, LAYOUT))
    o_n = feature + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, LAYOUT))
    p_out = out + o_m.to(gl.int64)[:, None] * stride_out + o_n[None, :]
    gl.store(p_out, part.load(LAYOUT), mask=(o_m < rows)[:, None] & (o_n >= 0)[None, :])


@gluon.jit
def _multiply(data, target, num_blocks, CONSUMER: gl.constexpr, REST: gl.constexpr):
    """A consumer warpgroup: its outputs of gate and of up for all rows, and the activation."""
    _, _, _, x_tiles, rest_tiles, w_tiles, full, empty, tile, _ = data
    # at least 16, so that the names exist without a rest
    COUNT: gl.constexpr = max(REST, 16)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MOST, 16])
    REST_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COUNT, 16])
    gate = gl.zeros([OUTPUTS, MOST], gl.float32, layout=LAYOUT)
    up = gl.zeros([OUTPUTS, MOST], gl.float32, layout=LAYOUT)
    rest_gate = gl.zeros([OUTPUTS, COUNT], gl.float32, layout=REST_LAYOUT)
    rest_up = gl.zeros([OUTPUTS, COUNT], gl.float32, layout=REST_LAYOUT)
    for block in range(0, num_blocks):
        stage, phase = block % STAGES, (block // STAGES) & 1
        mbarrier.wait(full.index(stage), phase)
        w_gate = w_tiles.index(2 * stage).slice(CONSUMER * OUTPUTS, OUTPUTS, 0)
        w_up = w_tiles.index(2 * stage + 1).slice(CONSUMER * OUTPUTS, OUTPUTS, 0)
        b_x = x_tiles.index(stage).permute((1, 0))
        gate = warpgroup_mma(w_gate, b_x, gate, is_async=True)
        up = warpgroup_mma(w_up, b_x, up, is_async=True)
        if REST:
            b_rest = rest_tiles.index(stage).permute((1, 0))
            rest_gate = warpgroup_mma(w_gate, b_rest, rest_gate, is_async=True)
            rest_up = warpgroup_mma(w_up, b_rest, rest_up, is_async=True)
            gate, up, rest_gate, rest_up = warpgroup_mma_wait(
                0, deps=[gate, up, rest_gate, rest_up]
            )
        else:
            gate, up = warpgroup_mma_wait(0, deps=[gate, up])
        wait_for_group()
        mbarrier.arrive(empty.index(stage), count=1)
    feature = tile * FEATURES + CONSUMER * OUTPUTS
    value = gated(gate, up).reshape([OUTPUTS, 2, MOST // 2]).permute((0, 2, 1))
    low, high = gl.split(value)
    staging = w_tiles.index(0).slice(CONSUMER * OUTPUTS, OUTPUTS, 0)
    _store(low, staging, target, feature, 0, MOST // 2)
    staging = w_tiles.index(1).slice(CONSUMER * OUTPUTS, OUTPUTS, 0)
    _store(high, staging, target, feature, MOST // 2, MOST // 2)
    if REST:
        staging = w_tiles.index(2).slice(CONSUMER * OUTPUTS, OUTPUTS, 0)
        _store(gated(rest_gate, rest_up), staging, target, feature, MOST, COUNT)


# compiled once for all numbers of rows
@gluon.jit(do_not_specialize=["rows"])
def _gated_several_kernel(
    x_desc, rest_desc, w_desc, out, rows, features, inner, stride_out, REST: gl.constexpr
):  # fmt: skip
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype = x_desc.dtype
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, MOST, INNER], SHARED)
    rest_tiles = x_tiles
    if REST:
        rest_tiles = gl.allocate_shared_memory(dtype, [STAGES, REST, INNER], SHARED)
    w_tiles = gl.allocate_shared_memory(dtype, [2 * STAGES, FEATURES, INNER], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    wait_for_group()
    tile, num_blocks = gl.program_id(0), inner // INNER
    data = (
        x_desc, rest_desc, w_desc, x_tiles, rest_tiles, w_tiles, full, empty, tile, features
    )  # fmt: skip
    target = (out, rows, stride_out)
    gl.warp_specialize(
        [
            (_multiply, (data, target, num_blocks, 0, REST)),
            (_multiply, (data, target, num_blocks, 1, REST)),
            (_fetch, (data, num_blocks, REST)),
        ],
        [4, 1], [232, 24],
    )  # fmt: skip


def rows_of_rest(rows: int) -> int:
    """Rows of the second product: 0, 16, 32 or 64."""
    rest = rows - MOST.value
    return next((count for count in (0, 16, 32) if rest <= count), 64)


def gated_linear_several(
    x: Float[Tensor, "rows inner"], weight: Float[Tensor, "twice_features inner"]
) -> Float[Tensor, "rows features"]:
    """See `looseleaf.ops.dense.gated_linear`."""
    (rows, inner), features = x.shape, weight.shape[0] // 2
    rest = rows_of_rest(rows)
    assert rows <= MOST.value + rest, "a program has all rows"
    assert features % FEATURES.value == 0 and inner % INNER.value == 0, "tiles must fit"
    assert x.stride(1) == 1 and weight.is_contiguous(), "inner dims must be contiguous"
    out = torch.empty((rows, features), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    layout, shape = gl.NVMMASharedLayout(128, 16, 2), [rows, inner]
    x_desc, rest_desc = (
        TensorDescriptor(x, shape, [x.stride(0), 1], [count, INNER.value], layout)
        for count in (MOST.value, max(rest, 16))
    )
    w_desc = TensorDescriptor.from_tensor(weight, [FEATURES.value, INNER.value], layout)
    _gated_several_kernel[(features // FEATURES.value,)](
        x_desc, rest_desc, w_desc, out, rows, features, inner, out.stride(0), REST=rest,
        num_warps=4, enable_fp_fusion=True, launch_pdl=True,
    )  # fmt: skip
    return out

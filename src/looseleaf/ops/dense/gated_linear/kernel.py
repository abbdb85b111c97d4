"""The gated products of up to 64 rows on Hopper: a producer warp and a consumer warpgroup per
program.

A program computes 64 outputs of gate and of up for all rows. The matrix does not depend on the
previous kernel, so the producer copies its first tiles before the wait for that kernel. Two
programs share an SM, so that reads continue from one kernel to the next."""

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

from looseleaf.ops.dense.gated_linear import FEATURES
from looseleaf.ops.dense.hopper_gate.kernel import gated
from looseleaf.ops.hopper.fetch.kernel import load_tile
from looseleaf.ops.hopper.tiles.kernel import ROWS, wait_for_group

# the width of the hardware's swizzle
INNER = gl.constexpr(64)
STAGES = gl.constexpr(4)


@gluon.jit
def _fetch_matrix(data, block, stage, FEATURES: gl.constexpr):
    """Copies a tile of gate and one of up; the barrier also expects the rows."""
    _, w_desc, _, w_tiles, full, _, tile, features = data
    column = block * INNER
    mbarrier.expect(full.index(stage), (2 * FEATURES + ROWS) * INNER * 2)
    load_tile(w_desc, [tile * FEATURES, column], full.index(stage), w_tiles.index(2 * stage))
    up_row = features + tile * FEATURES
    load_tile(w_desc, [up_row, column], full.index(stage), w_tiles.index(2 * stage + 1))


@gluon.jit
def _fetch_rows(data, block, stage):
    x_desc, _, x_tiles, _, full, _, _, _ = data
    load_tile(x_desc, [0, block * INNER], full.index(stage), x_tiles.index(stage))


@gluon.jit
def _fetch(data, num_blocks, FEATURES: gl.constexpr):
    """The producer warp."""
    empty = data[5]
    gdc_launch_dependents()
    early = gl.minimum(num_blocks, STAGES)
    for block in range(0, early):
        _fetch_matrix(data, block, block, FEATURES)
    # the previous kernel's output may be read from here on
    gdc_wait()
    for block in range(0, early):
        _fetch_rows(data, block, block)
    for block in range(early, num_blocks):
        stage, phase = block % STAGES, (block // STAGES) & 1
        mbarrier.wait(empty.index(stage), phase ^ 1)
        _fetch_matrix(data, block, stage, FEATURES)
        _fetch_rows(data, block, stage)


@gluon.jit
def _multiply(data, target, num_blocks, FEATURES: gl.constexpr, LAYOUT: gl.constexpr):
    """The consumer warpgroup: both products of all rows, and the activation."""
    _, _, x_tiles, w_tiles, full, empty, tile, _ = data
    out, rows, stride_out = target
    gate = gl.zeros([ROWS, FEATURES], gl.float32, layout=LAYOUT)
    up = gl.zeros([ROWS, FEATURES], gl.float32, layout=LAYOUT)
    for block in range(0, num_blocks):
        stage, phase = block % STAGES, (block // STAGES) & 1
        mbarrier.wait(full.index(stage), phase)
        b_x = x_tiles.index(stage)
        gate = warpgroup_mma(b_x, w_tiles.index(2 * stage).permute((1, 0)), gate, is_async=True)
        up = warpgroup_mma(b_x, w_tiles.index(2 * stage + 1).permute((1, 0)), up, is_async=True)
        gate, up = warpgroup_mma_wait(0, deps=[gate, up])
        wait_for_group()
        mbarrier.arrive(empty.index(stage), count=1)
    o_m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    o_n = tile * FEATURES + gl.arange(0, FEATURES, layout=gl.SliceLayout(0, LAYOUT))
    p_out = out + o_m[:, None] * stride_out + o_n[None, :]
    m_out = (o_m < rows)[:, None] & (o_n >= 0)[None, :]
    gl.store(p_out, gated(gate, up).to(out.dtype.element_ty), mask=m_out)


# compiled once for all numbers of rows
@gluon.jit(do_not_specialize=["rows"])
def _gated_linear_kernel(
    x_desc, w_desc, out, rows, features, inner, stride_out, FEATURES: gl.constexpr
):  # fmt: skip
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FEATURES, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype = x_desc.dtype
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, INNER], SHARED)
    w_tiles = gl.allocate_shared_memory(dtype, [2 * STAGES, FEATURES, INNER], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    wait_for_group()
    data = (x_desc, w_desc, x_tiles, w_tiles, full, empty, gl.program_id(0), features)
    gl.warp_specialize(
        [
            (_multiply, (data, (out, rows, stride_out), inner // INNER, FEATURES, LAYOUT)),
            (_fetch, (data, inner // INNER, FEATURES)),
        ],
        [1], [40],
    )  # fmt: skip


def gated_linear_gluon(
    x: Float[Tensor, "rows inner"], weight: Float[Tensor, "twice_features inner"]
) -> Float[Tensor, "rows features"]:
    """See `looseleaf.ops.dense.gated_linear`."""
    (rows, inner), features = x.shape, weight.shape[0] // 2
    assert rows <= ROWS.value, "a program has all rows"
    assert features % FEATURES == 0 and inner % INNER.value == 0, "tiles must fit"
    assert x.stride(1) == 1 and weight.is_contiguous(), "inner dims must be contiguous"
    out = torch.empty((rows, features), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    layout = gl.NVMMASharedLayout(128, 16, 2)
    x_desc = TensorDescriptor(x, [rows, inner], [x.stride(0), 1], [ROWS.value, INNER.value], layout)
    w_desc = TensorDescriptor.from_tensor(weight, [FEATURES, INNER.value], layout)
    _gated_linear_kernel[(features // FEATURES,)](
        x_desc, w_desc, out, rows, features, inner, out.stride(0), FEATURES=FEATURES,
        num_warps=4, maxnreg=128, enable_fp_fusion=True, launch_pdl=True,
    )  # fmt: skip
    return out

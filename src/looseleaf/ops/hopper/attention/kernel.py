"""Attention of packed rows over paged keys on Hopper: producer warps, and consumer warpgroups of 64
rows.

One producer warp copies pages of keys by TMA into a ring of tiles, another those of values. With
two consumer warpgroups, one multiplies while the other computes exponentials: in a fixed order over
a span list, in any order over a work list. Rows, frames and bounds are those of the portable
kernels. Windows, soft-caps, slopes, and decode rows with patches are left to the portable kernels.
"""

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from looseleaf.ops.hopper.barriers.kernel import yield_tensor_cores
from looseleaf.ops.hopper.entries.kernel import angles_of, queries_of, rotate_entries
from looseleaf.ops.hopper.fetch.kernel import (
    fetch,
    num_indices_of,
    num_slots_of,
    num_units_of,
    rows_of,
    unit_at,
    unit_of,
)
from looseleaf.ops.hopper.spans.kernel import read_spans
from looseleaf.ops.hopper.tiles.kernel import (
    HALF,
    PACKED,
    ROWS,
    fold_span,
    plain_end_of_run,
    rotate_rows,
    wait_for_group,
)
from looseleaf.ops.rotate.kernel import table
from looseleaf.types import Rotation, ScoreRule

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
_MAX_PREFETCH_ROWS = 32


@gluon.jit
def _store_states(
    outputs, lists, state, unit, first, local, num_packed, kv_head,
    DECODE: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    S_ROW: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Normalises and stores the states of 64 packed rows."""
    out, lse, stride_out, stride_out_head, stride_lse = outputs
    acc, peak, total = state
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    empty = total == 0.0
    total = gl.where(empty, 1.0, total)
    b_lse = gl.where(empty, float("-inf"), (peak + gl.log2(total)) * LN_2)
    share = gl.convert_layout(1.0 / total, O_ROW)[:, None]
    m_s, target_s, _, head_s = rows_of(
        lists, first, local, num_packed, kv_head, DECODE, GROUP, ROWS, S_ROW
    )
    m_o, target_o, _, head_o = rows_of(
        lists, first, local, num_packed, kv_head, DECODE, GROUP, ROWS, O_ROW
    )
    if DECODE:
        target_s = gl.load(lists[3] + target_s * 4 + 3, mask=m_s, other=0)
        target_o = gl.load(lists[3] + target_o * 4 + 3, mask=m_o, other=0)
    else:
        p_unit = lists[1] + unit // NUM_KV_HEADS * 8
        first_state, step = gl.load(p_unit + 6), gl.load(p_unit + 7)
        target_s = first_state + (target_s - first) * step
        target_o = first_state + (target_o - first) * step
    gl.store(lse + target_s.to(gl.int64) * stride_lse + head_s, b_lse, mask=m_s)
    p_out = out + target_o.to(gl.int64) * stride_out + head_o * stride_out_head
    o_d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, O_LAYOUT))
    p_out = p_out[:, None] + o_d[None, :]
    gl.store(p_out, (acc * share).to(out.dtype.element_ty), mask=m_o[:, None])


@gluon.jit
def _load_bounds(
    lists, item, entry, m_row, first, last, block, GROUP: gl.constexpr, CONSUMER: gl.constexpr,
    CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Inputs of `_reduce_bounds`.

    All loads are issued before the first use, and before the rows are rotated, so that latencies
    overlap."""
    first_position = gl.load(lists[2] + item * 8 + 5)
    last_position = gl.load(lists[2] + item * 8 + 6)
    bound = gl.load(lists[3] + entry * 4 + 2, mask=m_row, other=0)
    # each warp loads the bounds of all rows of the program, so no warp waits for another
    COUNT: gl.constexpr = CONSUMERS * ROWS // (GROUP if CONSUMERS * ROWS % GROUP == 0 else 2)
    PER_WARP: gl.constexpr = gl.BlockedLayout([(COUNT + 31) // 32], [32], [4], [0])
    all_entries = first + block // GROUP + gl.arange(0, COUNT, layout=PER_WARP)
    bounds = gl.load(lists[3] + all_entries * 4 + 2, mask=all_entries <= last, other=0)
    # a warpgroup clears values that are hidden from the rows of both
    local = block + CONSUMER * ROWS
    own = all_entries >= first + local // GROUP
    own &= all_entries <= first + (local + ROWS - 1) // GROUP
    least = gl.where(own & (all_entries <= last), bounds, 2147483647)
    return first_position, last_position, bound, bounds, least


@gluon.jit
def _reduce_bounds(item_bounds, num_pages, PAGE_SIZE: gl.constexpr):
    """Three slot bounds of an item: visible keys per row, keys that all rows see, keys that any row
    sees."""
    first_position, last_position, bound, bounds, least = item_bounds
    last_bound = gl.max(bounds, 0)
    least_bound = gl.min(least, 0)
    plain_end = plain_end_of_run(first_position, last_position, num_pages, least_bound, PAGE_SIZE)
    return bound, plain_end, last_bound


@gluon.jit
def _rotate_item(
    q_tile, lists, unit, queries, rotation,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, ROTARY_DIM: gl.constexpr,
    INTERLEAVED: gl.constexpr, BY_HEADS: gl.constexpr, AWAITED: gl.constexpr,
):  # fmt: skip
    """Rotates 64 packed rows of an item to its frame, into shared memory; waits for the queries."""
    first, local, num_packed, kv_head = unit
    q, stride_row, stride_head, scale = queries
    if BY_HEADS:
        angles = angles_of(lists, first, local, num_packed, scale, rotation, GROUP, ROTARY_DIM > 0)
        addresses = queries_of(lists, first, local, num_packed, kv_head, queries, GROUP)
        if not AWAITED:
            gdc_wait()
        rotate_entries(q_tile, addresses, angles)
    else:
        m_q, entry_q, row_q, head_q = rows_of(
            lists, first, local, num_packed, kv_head, True, GROUP, ROWS, gl.SliceLayout(1, PACKED)
        )
        vector = q + row_q.to(gl.int64) * stride_row + head_q * stride_head
        # a row before the frame sees no key in it: any angle is correct
        position = gl.maximum(gl.load(lists[3] + entry_q * 4 + 1, mask=m_q, other=0), 0)
        if not AWAITED:
            gdc_wait()
        rotate_rows(
            q_tile, vector, position, m_q, scale, rotation,
            HEAD_DIM, ROTARY_DIM, INTERLEAVED, PACKED,
        )  # fmt: skip


@gluon.jit
def _compute(
    data,
    CONSUMER: gl.constexpr, DECODE: gl.constexpr, MASKED: gl.constexpr, NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, ROTARY_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr, INTERLEAVED: gl.constexpr, CONSUMERS: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, AWAITED: gl.constexpr, BY_HEADS: gl.constexpr,
    IN_PARTS: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: 64 packed rows of every unit."""
    queries, rotation, outputs, q_tiles, tiles, barriers, lists = data
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    q_tile = q_tiles.index(CONSUMER)
    count = 0
    if CONSUMER == 1 and not DECODE:
        # the other warpgroup multiplies first
        yield_tensor_cores(CONSUMER)
    num_units = num_units_of(lists, DECODE, NUM_KV_HEADS)
    for index in range(gl.program_id(0), num_indices_of(num_units, DECODE), gl.num_programs(0)):
        unit, exists = unit_at(index, num_units, DECODE)
        kv_head, first, num_packed, begin, end, start_slot, end_slot = unit_of(
            lists, unit, exists, DECODE, NUM_KV_HEADS, GROUP
        )
        for block in range(0, num_packed, CONSUMERS * ROWS):
            local = block + CONSUMER * ROWS
            last = first + (gl.minimum(block + CONSUMERS * ROWS, num_packed) - 1) // GROUP
            m_s, entry_s, row_s, _ = rows_of(
                lists, first, local, num_packed, kv_head, DECODE, GROUP, ROWS, S_ROW
            )
            peak = gl.full([ROWS], float("-inf"), gl.float32, layout=S_ROW)
            total = gl.zeros([ROWS], gl.float32, layout=S_ROW)
            acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout=O_LAYOUT)
            state = acc, peak, total
            if DECODE:
                first_page, num_pages, num_slots = num_slots_of(
                    lists, begin, first, last, DECODE, MASKED, PAGE_SIZE
                )
                item_bounds = _load_bounds(
                    lists, begin, entry_s, m_s, first, last, block, GROUP, CONSUMER, CONSUMERS
                )
                _rotate_item(
                    q_tile, lists, (first, local, num_packed, kv_head), queries,
                    rotation, GROUP, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BY_HEADS, AWAITED,
                )  # fmt: skip
                if num_slots > 0:
                    bound, plain_end, last_bound = _reduce_bounds(item_bounds, num_pages, PAGE_SIZE)
                    fence_async_shared()
                    wait_for_group()
                    state, count = fold_span(
                        q_tile, tiles, barriers, state, count, lists,
                        (first_page, 0, num_slots, plain_end, bound, last_bound, -1), (),
                        CONSUMER, DECODE, MASKED, PAGE_SIZE, KEYS, STAGES, S_LAYOUT, O_LAYOUT,
                        GROUP, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BY_HEADS, CONSUMERS, False,
                    )  # fmt: skip
            else:
                row_position = gl.load(lists[7] + row_s, mask=m_s, other=0)
                state, count = read_spans(
                    data, (first, local, num_packed, kv_head),
                    (begin, end, start_slot, end_slot, last), (m_s, entry_s, row_position),
                    state, count,
                    CONSUMER, CONSUMERS, MASKED, GROUP, HEAD_DIM, ROTARY_DIM, PAGE_SIZE,
                    INTERLEAVED, KEYS, STAGES, AWAITED, BY_HEADS, IN_PARTS, S_LAYOUT, O_LAYOUT,
                )  # fmt: skip
            _store_states(
                outputs, lists, state, unit, first, local, num_packed, kv_head,
                DECODE, NUM_KV_HEADS, GROUP, HEAD_DIM, S_ROW, O_LAYOUT,
            )  # fmt: skip


@gluon.jit
def _full_barriers(STAGES: gl.constexpr):
    """mbarriers of a ring of tiles, with one arrival each: a tile is complete."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    return full


@gluon.jit
def _hopper_attention_kernel(
    k_desc, v_desc, q, out, lse, cos, sin, page_indices, lists,
    stride_row, stride_head, stride_out, stride_out_head, stride_lse, stride_table, scale,
    DECODE: gl.constexpr, MASKED: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, ROTARY_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr,
    INTERLEAVED: gl.constexpr, CONSUMERS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    AWAITED: gl.constexpr, BY_HEADS: gl.constexpr, IN_PARTS: gl.constexpr, ANGLES: gl.constexpr,
):  # fmt: skip
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype = k_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, HEAD_DIM], SHARED)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_DIM], SHARED)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_DIM], SHARED)
    k_full, v_full, k_issued = _full_barriers(STAGES), _full_barriers(STAGES), _full_barriers(1)
    fence_async_shared()
    wait_for_group()
    rotation = (cos, sin, stride_table)
    outputs = (out, lse, stride_out, stride_out_head, stride_lse)
    k_side = (k_desc, k_tiles, k_full, k_issued, page_indices, lists, rotation)
    v_side = (v_desc, v_tiles, v_full, k_issued, page_indices, lists, rotation)
    queries = (q, stride_row, stride_head, scale)
    data = (queries, rotation, outputs, q_tiles, (k_tiles, v_tiles), (k_full, v_full), lists)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_compute, (
                    data, 0, DECODE, MASKED, NUM_KV_HEADS, GROUP, HEAD_DIM, ROTARY_DIM,
                    PAGE_SIZE, INTERLEAVED, CONSUMERS, KEYS, STAGES, AWAITED, BY_HEADS, IN_PARTS,
                )),
                (_compute, (
                    data, 1, DECODE, MASKED, NUM_KV_HEADS, GROUP, HEAD_DIM, ROTARY_DIM,
                    PAGE_SIZE, INTERLEAVED, CONSUMERS, KEYS, STAGES, AWAITED, BY_HEADS, IN_PARTS,
                )),
                (fetch, (
                    k_side, 0, DECODE, MASKED, NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE,
                    SHARED, CONSUMERS, KEYS, STAGES, AWAITED, IN_PARTS, ANGLES,
                )),
                (fetch, (
                    v_side, 1, DECODE, MASKED, NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE,
                    SHARED, CONSUMERS, KEYS, STAGES, AWAITED, IN_PARTS, ANGLES,
                )),
            ],
            [4, 1, 1], [232, 40, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_compute, (
                    data, 0, DECODE, MASKED, NUM_KV_HEADS, GROUP, HEAD_DIM, ROTARY_DIM,
                    PAGE_SIZE, INTERLEAVED, CONSUMERS, KEYS, STAGES, AWAITED, BY_HEADS, IN_PARTS,
                )),
                (fetch, (
                    k_side, 0, DECODE, MASKED, NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE,
                    SHARED, CONSUMERS, KEYS, STAGES, AWAITED, IN_PARTS, ANGLES,
                )),
                (fetch, (
                    v_side, 1, DECODE, MASKED, NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE,
                    SHARED, CONSUMERS, KEYS, STAGES, AWAITED, IN_PARTS, ANGLES,
                )),
            ],
            [1, 1], [40, 40],
        )  # fmt: skip


def _descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
    """TMA descriptor of pages as rows of keys, in boxes of ``rows`` rows and 64 dims."""
    layout = gl.NVMMASharedLayout(128, 16, 2)
    flat = tensor.view(-1, tensor.shape[-1])
    return TensorDescriptor.from_tensor(flat, [rows, HALF.value], layout)


class Grid(NamedTuple):
    """Sizes of a launch.

    ``awaited``: the previous kernel is of the same kind and has waited for the kernels that wrote
    queries and pages. ``in_parts``: tiles of the span list are cut."""

    programs: int
    num_warpgroups: int
    awaited: bool = False
    in_parts: bool = False


def _prefetch_width(rotation: Rotation, group: int, grid: Grid) -> int:
    """Angles per row that a producer warp prefetches, 0 for none.

    None for more rows than a warp prefetches in the time of a tile, and for tables whose rows are
    not aligned to 16 bytes."""
    angles, addresses = rotation.rotary_dim // 2, rotation.cos.data_ptr() | rotation.sin.data_ptr()
    is_aligned = angles % 4 == 0 and rotation.cos.stride(0) % 4 == 0 and addresses % 16 == 0
    few_rows = ROWS.value * grid.num_warpgroups <= _MAX_PREFETCH_ROWS * group
    return angles if is_aligned and few_rows else 0


def sizes(head_dim: int, num_warpgroups: int, *, decode: bool) -> tuple[int, int, int | None]:
    """Keys of a tile, tiles of a ring, and registers per thread (None for no limit).

    Two programs with one warpgroup share an SM and have eight warps each. Those that ``decode``
    keep 64 KB of keys and values in flight; more in flight lowers the memory throughput
    (docs/log.md)."""
    if num_warpgroups == 2:
        return 128, 3, None
    if head_dim == 128:
        return 64, 2 if decode else 3, 128
    return 64, 4, 128


def by_heads(group: int, rotation: Rotation, head_dim: int) -> bool:
    """Whether the heads of a row are rotated together."""
    all_dims = rotation.rotary_dim in (0, head_dim) and not rotation.interleaved
    return all_dims and head_dim == 128 and group in (1, 2, 4, 8)


def launch(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    lists: tuple[Tensor, ...],
    page_indices: Tensor,
    state: tuple[Tensor, Tensor],
    rotation: Rotation,
    rule: ScoreRule,
    grid: Grid,
) -> None:
    """Runs over a work list (five arrays), a span list (eight) or a span list with patches (ten).

    Writes ``state``. The arrays of a work list are first item, end item, numbers of items, numbers
    of entries, and positions of pages."""
    k_pages, v_pages = pages
    out, lse = state
    num_kv_heads, page_size, head_dim = k_pages.shape[1:]
    group = q.shape[1] // num_kv_heads
    keys, stages, registers = sizes(head_dim, grid.num_warpgroups, decode=len(lists) == 5)
    # rows are loaded 16 bytes at a time
    assert q.stride(2) == 1 and q.stride(1) % 8 == 0, "heads must be aligned to 16 bytes"
    _hopper_attention_kernel[(grid.programs,)](
        _descriptor(k_pages, page_size), _descriptor(v_pages, page_size), q, out, lse,
        *table(rotation), page_indices, lists, *q.stride()[:2], *out.stride()[:2], lse.stride(0),
        rotation.cos.stride(0), rule.softmax_scale * LOG2_E.value,
        DECODE=len(lists) == 5, MASKED=len(lists) == 10, NUM_KV_HEADS=num_kv_heads,
        GROUP=group, HEAD_DIM=head_dim, ROTARY_DIM=rotation.rotary_dim,
        PAGE_SIZE=page_size, INTERLEAVED=rotation.interleaved, CONSUMERS=grid.num_warpgroups,
        KEYS=keys, STAGES=stages, AWAITED=grid.awaited,
        BY_HEADS=by_heads(group, rotation, head_dim),
        IN_PARTS=grid.in_parts, ANGLES=_prefetch_width(rotation, group, grid),
        num_warps=4, maxnreg=registers, enable_fp_fusion=True, launch_pdl=True,
    )  # fmt: skip

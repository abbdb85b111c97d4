"""Attention of 128 packed rows over paged keys on Hopper: a warp that fetches, two warp groups that
compute.

The fetching warp has the tensor memory accelerator copy pages into rings of tiles of keys and of
values; each computing group takes 64 of the rows. One multiplies while the other takes
exponentials: over a span list in a fixed order, over a work list since they drift apart. Rows,
frames and bounds are those of the portable kernels; windows, caps and slopes are left to them, and
of rows with patches those that decode.
"""

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from looseleaf.ops.hopper.barriers.kernel import leave_products
from looseleaf.ops.hopper.entries.kernel import angles_of, queries_of, turn_entries
from looseleaf.ops.hopper.fetch.kernel import (
    fetch,
    num_places_of,
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
    turn_rows,
    wait_for_group,
)
from looseleaf.ops.rotate.kernel import table
from looseleaf.types import Rotation, ScoreRule

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
_MOST_ROWS_ASKED = 32


@gluon.jit
def _store_states(
    outputs, lists, state, unit, first, local, num_packed, kv_head,
    DECODE: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    S_ROW: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """What 64 packed rows have come to."""
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
def _asked_bounds(
    lists, item, place, m_row, first, last, block, GROUP: gl.constexpr, WORKER: gl.constexpr,
    WORKERS: gl.constexpr,
):  # fmt: skip
    """What `_bounds` are made of: all is asked for before any of it is used, and before the rows
    turn, since one after another latencies would add up."""
    first_position = gl.load(lists[2] + item * 8 + 5)
    last_position = gl.load(lists[2] + item * 8 + 6)
    bound = gl.load(lists[3] + place * 4 + 2, mask=m_row, other=0)
    # every warp has those of all rows of the program, so no warp waits for another's
    COUNT: gl.constexpr = WORKERS * ROWS // (GROUP if WORKERS * ROWS % GROUP == 0 else 2)
    EACH: gl.constexpr = gl.BlockedLayout([(COUNT + 31) // 32], [32], [4], [0])
    every = first + block // GROUP + gl.arange(0, COUNT, layout=EACH)
    bounds = gl.load(lists[3] + every * 4 + 2, mask=every <= last, other=0)
    # what one group clears is what the rows of neither see
    local = block + WORKER * ROWS
    own = (every >= first + local // GROUP) & (every <= first + (local + ROWS - 1) // GROUP)
    least = gl.where(own & (every <= last), bounds, 2147483647)
    return first_position, last_position, bound, bounds, least


@gluon.jit
def _bounds(asked, num_pages, PAGE_SIZE: gl.constexpr):
    """Before which slot the keys of an item are that each row sees, before which all rows see all,
    and before which all are that any row of the program sees."""
    first_position, last_position, bound, bounds, least = asked
    last_bound = gl.max(bounds, 0)
    least_bound = gl.min(least, 0)
    plain_end = plain_end_of_run(first_position, last_position, num_pages, least_bound, PAGE_SIZE)
    return bound, plain_end, last_bound


@gluon.jit
def _turn_item(
    q_tile, lists, unit, queries, rotation,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, ROTARY_DIM: gl.constexpr,
    INTERLEAVED: gl.constexpr, BY_HEADS: gl.constexpr, AWAITED: gl.constexpr,
):  # fmt: skip
    """64 packed rows of an item, turned to its frame, to shared memory; waits for the queries."""
    first, local, num_packed, kv_head = unit
    q, stride_row, stride_head, scale = queries
    if BY_HEADS:
        angles = angles_of(lists, first, local, num_packed, scale, rotation, GROUP, ROTARY_DIM > 0)
        where = queries_of(lists, first, local, num_packed, kv_head, queries, GROUP)
        if not AWAITED:
            gdc_wait()
        turn_entries(q_tile, where, angles)
    else:
        m_q, place_q, row_q, head_q = rows_of(
            lists, first, local, num_packed, kv_head, True, GROUP, ROWS, gl.SliceLayout(1, PACKED)
        )
        vector = q + row_q.to(gl.int64) * stride_row + head_q * stride_head
        # a row before the frame sees nothing in it, and has no angle there
        position = gl.maximum(gl.load(lists[3] + place_q * 4 + 1, mask=m_q, other=0), 0)
        if not AWAITED:
            gdc_wait()
        turn_rows(
            q_tile, vector, position, m_q, scale, rotation,
            HEAD_DIM, ROTARY_DIM, INTERLEAVED, PACKED,
        )  # fmt: skip


@gluon.jit
def _compute(
    data,
    WORKER: gl.constexpr, DECODE: gl.constexpr, MASKED: gl.constexpr, NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, ROTARY_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr, INTERLEAVED: gl.constexpr, WORKERS: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, AWAITED: gl.constexpr, BY_HEADS: gl.constexpr,
    IN_PARTS: gl.constexpr,
):  # fmt: skip
    """A computing group: 64 packed rows of every unit."""
    queries, rotation, outputs, q_tiles, tiles, barriers, lists = data
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    q_tile = q_tiles.index(WORKER)
    count = 0
    if WORKER == 1 and not DECODE:
        # the other group is the first to multiply
        leave_products(WORKER)
    num_units = num_units_of(lists, DECODE, NUM_KV_HEADS)
    for place in range(gl.program_id(0), num_places_of(num_units, DECODE), gl.num_programs(0)):
        unit, there = unit_at(place, num_units, DECODE)
        kv_head, first, num_packed, begin, end, skip, before = unit_of(
            lists, unit, there, DECODE, NUM_KV_HEADS, GROUP
        )
        for block in range(0, num_packed, WORKERS * ROWS):
            local = block + WORKER * ROWS
            last = first + (gl.minimum(block + WORKERS * ROWS, num_packed) - 1) // GROUP
            m_s, place_s, row_s, _ = rows_of(
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
                asked = _asked_bounds(
                    lists, begin, place_s, m_s, first, last, block, GROUP, WORKER, WORKERS
                )
                _turn_item(
                    q_tile, lists, (first, local, num_packed, kv_head), queries,
                    rotation, GROUP, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BY_HEADS, AWAITED,
                )  # fmt: skip
                if num_slots > 0:
                    bound, plain_end, last_bound = _bounds(asked, num_pages, PAGE_SIZE)
                    fence_async_shared()
                    wait_for_group()
                    state, count = fold_span(
                        q_tile, tiles, barriers, state, count, lists,
                        (first_page, 0, num_slots, plain_end, bound, last_bound, -1), (),
                        WORKER, DECODE, MASKED, PAGE_SIZE, KEYS, STAGES, S_LAYOUT, O_LAYOUT,
                        GROUP, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BY_HEADS, WORKERS, False,
                    )  # fmt: skip
            else:
                true = gl.load(lists[7] + row_s, mask=m_s, other=0)
                state, count = read_spans(
                    data, (first, local, num_packed, kv_head),
                    (begin, end, skip, before, last), (m_s, place_s, true), state, count,
                    WORKER, WORKERS, MASKED, GROUP, HEAD_DIM, ROTARY_DIM, PAGE_SIZE,
                    INTERLEAVED, KEYS, STAGES, AWAITED, BY_HEADS, IN_PARTS, S_LAYOUT, O_LAYOUT,
                )  # fmt: skip
            _store_states(
                outputs, lists, state, unit, first, local, num_packed, kv_head,
                DECODE, NUM_KV_HEADS, GROUP, HEAD_DIM, S_ROW, O_LAYOUT,
            )  # fmt: skip


@gluon.jit
def _filled(STAGES: gl.constexpr):
    """Barriers that one arrives at, as those of a ring of tiles, of which each says that a tile is
    there."""
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
    INTERLEAVED: gl.constexpr, WORKERS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    AWAITED: gl.constexpr, BY_HEADS: gl.constexpr, IN_PARTS: gl.constexpr, ANGLES: gl.constexpr,
):  # fmt: skip
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype = k_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [WORKERS, ROWS, HEAD_DIM], SHARED)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_DIM], SHARED)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_DIM], SHARED)
    k_full, v_full, k_asked = _filled(STAGES), _filled(STAGES), _filled(1)
    fence_async_shared()
    wait_for_group()
    rotation = (cos, sin, stride_table)
    outputs = (out, lse, stride_out, stride_out_head, stride_lse)
    k_side = (k_desc, k_tiles, k_full, k_asked, page_indices, lists, rotation)
    v_side = (v_desc, v_tiles, v_full, k_asked, page_indices, lists, rotation)
    queries = (q, stride_row, stride_head, scale)
    data = (queries, rotation, outputs, q_tiles, (k_tiles, v_tiles), (k_full, v_full), lists)
    if WORKERS == 2:
        gl.warp_specialize(
            [
                (_compute, (
                    data, 0, DECODE, MASKED, NUM_KV_HEADS, GROUP, HEAD_DIM, ROTARY_DIM,
                    PAGE_SIZE, INTERLEAVED, WORKERS, KEYS, STAGES, AWAITED, BY_HEADS, IN_PARTS,
                )),
                (_compute, (
                    data, 1, DECODE, MASKED, NUM_KV_HEADS, GROUP, HEAD_DIM, ROTARY_DIM,
                    PAGE_SIZE, INTERLEAVED, WORKERS, KEYS, STAGES, AWAITED, BY_HEADS, IN_PARTS,
                )),
                (fetch, (
                    k_side, 0, DECODE, MASKED, NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE,
                    SHARED, WORKERS, KEYS, STAGES, AWAITED, IN_PARTS, ANGLES,
                )),
                (fetch, (
                    v_side, 1, DECODE, MASKED, NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE,
                    SHARED, WORKERS, KEYS, STAGES, AWAITED, IN_PARTS, ANGLES,
                )),
            ],
            [4, 1, 1], [232, 40, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_compute, (
                    data, 0, DECODE, MASKED, NUM_KV_HEADS, GROUP, HEAD_DIM, ROTARY_DIM,
                    PAGE_SIZE, INTERLEAVED, WORKERS, KEYS, STAGES, AWAITED, BY_HEADS, IN_PARTS,
                )),
                (fetch, (
                    k_side, 0, DECODE, MASKED, NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE,
                    SHARED, WORKERS, KEYS, STAGES, AWAITED, IN_PARTS, ANGLES,
                )),
                (fetch, (
                    v_side, 1, DECODE, MASKED, NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE,
                    SHARED, WORKERS, KEYS, STAGES, AWAITED, IN_PARTS, ANGLES,
                )),
            ],
            [1, 1], [40, 40],
        )  # fmt: skip


def _descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Pages as rows of keys, fetched ``rows`` rows and 64 dims at a time."""
    layout = gl.NVMMASharedLayout(128, 16, 2)
    flat = tensor.view(-1, tensor.shape[-1])
    return TensorDescriptor.from_tensor(flat, [rows, HALF.value], layout)


class Grid(NamedTuple):
    """How many programs with how many computing groups; ``awaited``: the kernel before this one is
    of the same kind and has waited for whatever wrote the queries and the pages; ``in_parts``: the
    tiles of a span list are cut."""

    programs: int
    num_groups: int
    awaited: bool = False
    in_parts: bool = False


def _angles_asked_for(rotation: Rotation, group: int, grid: Grid) -> int:
    """How many angles of a row a fetching warp asks for: none of so many rows that it takes it as
    long as a tile, nor of a table whose rows do not begin where 16 bytes do."""
    angles, begins = rotation.rotary_dim // 2, rotation.cos.data_ptr() | rotation.sin.data_ptr()
    fit = angles % 4 == 0 and rotation.cos.stride(0) % 4 == 0 and begins % 16 == 0
    return angles if fit and ROWS.value * grid.num_groups <= _MOST_ROWS_ASKED * group else 0


def sizes(head_dim: int, num_groups: int, *, decode: bool) -> tuple[int, int, int | None]:
    """Keys of a tile, tiles in a ring and registers of a thread, None for all there are.

    Two programs of one group share a multiprocessor, and each has eight warps. Those that
    ``decode`` have 64 KB of keys and values on their way: memory gives less of them where more is
    asked for at a time (docs/log.md)."""
    if num_groups == 2:
        return 128, 3, None
    if head_dim == 128:
        return 64, 2 if decode else 3, 128
    return 64, 4, 128


def by_heads(group: int, rotation: Rotation, head_dim: int) -> bool:
    """Whether the heads of a row of a span list turn together."""
    turned = rotation.rotary_dim in (0, head_dim) and not rotation.interleaved
    return turned and head_dim == 128 and group in (1, 2, 4, 8)


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
    """Run over a work list (five arrays), a span list (eight) or one with patches (ten), writing
    ``state``.

    Of a work list: first and end item, numbers of items and of entries, and positions of pages.
    """
    k_pages, v_pages = pages
    out, lse = state
    num_kv_heads, page_size, head_dim = k_pages.shape[1:]
    group = q.shape[1] // num_kv_heads
    keys, stages, registers = sizes(head_dim, grid.num_groups, decode=len(lists) == 5)
    # rows are read 16 bytes at a time
    assert q.stride(2) == 1 and q.stride(1) % 8 == 0, "heads begin anywhere"
    _hopper_attention_kernel[(grid.programs,)](
        _descriptor(k_pages, page_size), _descriptor(v_pages, page_size), q, out, lse,
        *table(rotation), page_indices, lists, *q.stride()[:2], *out.stride()[:2], lse.stride(0),
        rotation.cos.stride(0), rule.softmax_scale * LOG2_E.value,
        DECODE=len(lists) == 5, MASKED=len(lists) == 10, NUM_KV_HEADS=num_kv_heads,
        GROUP=group, HEAD_DIM=head_dim, ROTARY_DIM=rotation.rotary_dim,
        PAGE_SIZE=page_size, INTERLEAVED=rotation.interleaved, WORKERS=grid.num_groups,
        KEYS=keys, STAGES=stages, AWAITED=grid.awaited,
        BY_HEADS=by_heads(group, rotation, head_dim),
        IN_PARTS=grid.in_parts, ANGLES=_angles_asked_for(rotation, group, grid),
        num_warps=4, maxnreg=registers, enable_fp_fusion=True, launch_pdl=True,
    )  # fmt: skip

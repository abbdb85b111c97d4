"""Attention of 128 packed rows over paged keys on Hopper: a warp that fetches, two warp groups that
compute.

The fetching warp has the tensor memory accelerator copy pages into rings of tiles of keys and of
values; each computing group takes 64 of the rows. They drift apart, so that one multiplies while
the other takes exponentials. Rows, frames and bounds are those of the portable kernels; windows,
caps, slopes, bitmaps and explicit positions are left to them.
"""

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from looseleaf.ops.hopper_tiles.kernel import (
    HALF,
    ROWS,
    fold_span,
    plain_end_of,
    turn_rows,
    wait_for_group,
)
from looseleaf.ops.rotate.kernel import table
from looseleaf.types import Rotation, ScoreRule

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
# what Triton 3.6 calls by other names than later versions
OLD_NAMES = gl.constexpr(not hasattr(gl.shared_memory_descriptor, "reinterpret"))
load_tile = tma.async_copy_global_to_shared if OLD_NAMES.value else tma.async_load


@gluon.jit
def _unit(lists, unit, DECODE: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr):
    """Head, first row (or entry), packed rows and spans of a unit."""
    if DECODE:
        item = gl.load(lists[0]) + unit // NUM_KV_HEADS
        kv_head = unit % NUM_KV_HEADS
        first = gl.load(lists[3] + item)
        only_head = gl.load(lists[10] + item)
        num_packed = (gl.load(lists[3] + item + 1) - first) * GROUP
        num_packed = gl.where((only_head < 0) | (only_head == kv_head), num_packed, 0)
        return kv_head, first, num_packed, item, item + 1
    else:
        # the last rows of a request read the most: their tiles go first
        tile = gl.load(lists[0]) - 1 - unit // NUM_KV_HEADS
        first = gl.load(lists[1] + tile)
        num_packed = (gl.load(lists[1] + tile + 1) - first) * GROUP
        request = gl.load(lists[2] + tile)
        begin, end = gl.load(lists[3] + request), gl.load(lists[3] + request + 1)
        return unit % NUM_KV_HEADS, first, num_packed, begin, end


@gluon.jit
def _num_units(lists, DECODE: gl.constexpr, NUM_KV_HEADS: gl.constexpr):
    if DECODE:
        return (gl.load(lists[1]) - gl.load(lists[0])) * NUM_KV_HEADS
    else:
        return gl.load(lists[0]) * NUM_KV_HEADS


@gluon.jit
def _num_slots(lists, span, first, last, DECODE: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """First page of a span, its pages, and how many of its slots the rows up to ``last`` may
    see."""
    page_indptr = lists[2] if DECODE else lists[4]
    first_page = gl.load(page_indptr + span)
    num_pages = gl.load(page_indptr + span + 1) - first_page
    if DECODE:
        return first_page, num_pages, num_pages * PAGE_SIZE
    else:
        latest = gl.load(lists[9] + last)
        length = gl.minimum(gl.load(lists[6] + span), latest - gl.load(lists[5] + span) + 1)
        return first_page, num_pages, gl.maximum(length, 0)


@gluon.jit
def _fetch(
    data,
    DECODE: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, SHARED: gl.constexpr,
    WORKERS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, AWAITED: gl.constexpr,
):  # fmt: skip
    """The fetching warp: every tile of every span of every unit, in the order of the readers."""
    k_desc, v_desc, k_tiles, v_tiles, barriers, page_indices, lists = data
    k_full, k_empty, v_full, v_empty = barriers
    HALVES: gl.constexpr = HEAD_DIM // HALF
    RUN: gl.constexpr = KEYS // PAGE_SIZE
    if OLD_NAMES:
        k_pages = k_tiles._reinterpret(
            k_tiles.dtype, [STAGES * HALVES * RUN, PAGE_SIZE, HALF], SHARED
        )
        v_pages = v_tiles._reinterpret(
            v_tiles.dtype, [STAGES * HALVES * RUN, PAGE_SIZE, HALF], SHARED
        )
    else:
        k_pages = k_tiles.reinterpret(
            k_tiles.dtype, [STAGES * HALVES * RUN, PAGE_SIZE, HALF], SHARED
        )
        v_pages = v_tiles.reinterpret(
            v_tiles.dtype, [STAGES * HALVES * RUN, PAGE_SIZE, HALF], SHARED
        )
    count = 0
    num_units = _num_units(lists, DECODE, NUM_KV_HEADS)
    if not AWAITED:
        gdc_wait()
    # started no sooner, the next kernel need not wait for what this one has waited for
    gdc_launch_dependents()
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        kv_head, first, num_packed, begin, end = _unit(lists, unit, DECODE, NUM_KV_HEADS, GROUP)
        for block in range(0, num_packed, WORKERS * ROWS):
            last = first + (gl.minimum(block + WORKERS * ROWS, num_packed) - 1) // GROUP
            for span in range(begin, end):
                first_page, num_pages, num_slots = _num_slots(
                    lists, span, first, last, DECODE, PAGE_SIZE
                )
                for start in range(0, num_slots, KEYS):
                    stage, phase = count % STAGES, (count // STAGES) & 1
                    mbarrier.wait(k_empty.index(stage), phase ^ 1)
                    mbarrier.expect(k_full.index(stage), KEYS * HEAD_DIM * 2)
                    for n in gl.static_range(RUN):
                        # past the run some page of it is read once more, and nobody looks
                        ordinal = gl.minimum(start // PAGE_SIZE + n, num_pages - 1)
                        page = gl.load(page_indices + first_page + ordinal)
                        row = (page * NUM_KV_HEADS + kv_head) * PAGE_SIZE
                        for half in gl.static_range(HALVES):
                            load_tile(
                                k_desc, [row, half * HALF], k_full.index(stage),
                                k_pages.index((stage * HALVES + half) * RUN + n),
                            )  # fmt: skip
                    mbarrier.wait(v_empty.index(stage), phase ^ 1)
                    mbarrier.expect(v_full.index(stage), KEYS * HEAD_DIM * 2)
                    for n in gl.static_range(RUN):
                        ordinal = gl.minimum(start // PAGE_SIZE + n, num_pages - 1)
                        page = gl.load(page_indices + first_page + ordinal)
                        row = (page * NUM_KV_HEADS + kv_head) * PAGE_SIZE
                        for half in gl.static_range(HALVES):
                            load_tile(
                                v_desc, [row, half * HALF], v_full.index(stage),
                                v_pages.index((stage * HALVES + half) * RUN + n),
                            )  # fmt: skip
                    count += 1
    if AWAITED:
        # who waits for this kernel must not find the one before it unfinished
        gdc_wait()


@gluon.jit
def _rows_of(
    lists, first, local, num_packed, kv_head,
    DECODE: gl.constexpr, GROUP: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Of 64 packed rows in some layout: which there are, row (or entry), query row and head."""
    packed = local + gl.arange(0, ROWS, layout=LAYOUT)
    m_row = packed < num_packed
    place = first + packed // GROUP
    row = place
    if DECODE:
        row = gl.load(lists[4] + place, mask=m_row, other=0)
    return m_row, place, row, kv_head * GROUP + packed % GROUP


@gluon.jit
def _compute(
    data,
    WORKER: gl.constexpr, DECODE: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, ROTARY_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr,
    INTERLEAVED: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
    WORKERS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, AWAITED: gl.constexpr,
):  # fmt: skip
    """A computing group: 64 packed rows of every unit."""
    queries, rotation, outputs, q_tiles, k_tiles, v_tiles, barriers, lists = data
    q, stride_row, stride_head, stride_d, scale = queries
    out, lse, stride_out, stride_out_head, stride_lse = outputs
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    HALVES: gl.constexpr = HEAD_DIM // HALF
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    count = 0
    num_units = _num_units(lists, DECODE, NUM_KV_HEADS)
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        kv_head, first, num_packed, begin, end = _unit(lists, unit, DECODE, NUM_KV_HEADS, GROUP)
        for block in range(0, num_packed, WORKERS * ROWS):
            local = block + WORKER * ROWS
            last = first + (gl.minimum(block + WORKERS * ROWS, num_packed) - 1) // GROUP
            m_q, place_q, row_q, head_q = _rows_of(
                lists, first, local, num_packed, kv_head, DECODE, GROUP, gl.SliceLayout(1, LOAD)
            )
            m_s, place_s, row_s, _ = _rows_of(
                lists, first, local, num_packed, kv_head, DECODE, GROUP, S_ROW
            )
            if not AWAITED:
                gdc_wait()
            vector = q + row_q.to(gl.int64) * stride_row + head_q * stride_head
            true_q = gl.load(lists[9] + row_q, mask=m_q, other=0)
            true_s = gl.load(lists[9] + row_s, mask=m_s, other=0)
            peak = gl.full([ROWS], float("-inf"), gl.float32, layout=S_ROW)
            total = gl.zeros([ROWS], gl.float32, layout=S_ROW)
            low = gl.zeros([ROWS, HALF], gl.float32, layout=O_LAYOUT)
            high = gl.zeros([ROWS, HALF], gl.float32, layout=O_LAYOUT)
            for span in range(begin, end):
                first_page, num_pages, num_slots = _num_slots(
                    lists, span, first, last, DECODE, PAGE_SIZE
                )
                if num_slots > 0:
                    if DECODE:
                        offset = gl.load(lists[5] + place_q, mask=m_q, other=0)
                        bound = gl.load(lists[6] + place_s, mask=m_s, other=0)
                        # what one group clears is what the rows of neither see
                        every = first + (block + gl.arange(0, WORKERS * ROWS, layout=FLAT)) // GROUP
                        m_every = every <= last
                        last_bound = gl.max(gl.load(lists[6] + every, mask=m_every, other=0), 0)
                    else:
                        offset = gl.load(lists[5] + span)
                        length = gl.load(lists[6] + span)
                        bound = gl.where(m_s, gl.minimum(true_s - offset + 1, length), 0)
                        last_bound = num_slots
                    least_bound = gl.min(gl.where(m_s, bound, 2147483647), 0)
                    plain_end = plain_end_of(
                        lists, first_page, num_pages, least_bound, DECODE, PAGE_SIZE
                    )
                    position = gl.maximum(true_q - offset, 0)
                    turn_rows(
                        q_tiles, vector, stride_d, position, m_q, scale, rotation, WORKER,
                        HEAD_DIM, ROTARY_DIM, INTERLEAVED, LOAD,
                    )  # fmt: skip
                    fence_async_shared()
                    wait_for_group()
                    low, high, peak, total, count = fold_span(
                        q_tiles, k_tiles, v_tiles, barriers, low, high, peak, total, count,
                        lists, (first_page, num_slots, plain_end, bound, last_bound),
                        WORKER, DECODE, HEAD_DIM, PAGE_SIZE, KEYS, STAGES, S_LAYOUT, O_LAYOUT,
                    )  # fmt: skip
            empty = total == 0.0
            total = gl.where(empty, 1.0, total)
            b_lse = gl.where(empty, float("-inf"), (peak + gl.log2(total)) * LN_2)
            share = gl.convert_layout(1.0 / total, O_ROW)[:, None]
            target_s, head_s = (
                place_s,
                kv_head * GROUP + (local + gl.arange(0, ROWS, layout=S_ROW)) % GROUP,
            )
            m_o, place_o, _, head_o = _rows_of(
                lists, first, local, num_packed, kv_head, DECODE, GROUP, O_ROW
            )
            target_o = place_o
            if DECODE:
                target_s = gl.load(lists[8] + place_s, mask=m_s, other=0)
                target_o = gl.load(lists[8] + place_o, mask=m_o, other=0)
            gl.store(lse + target_s.to(gl.int64) * stride_lse + head_s, b_lse, mask=m_s)
            p_out = out + target_o.to(gl.int64) * stride_out + head_o * stride_out_head
            o_d = gl.arange(0, HALF, layout=gl.SliceLayout(0, O_LAYOUT))
            p_out = p_out[:, None] + o_d[None, :]
            gl.store(p_out, (low * share).to(out.dtype.element_ty), mask=m_o[:, None])
            if HALVES == 2:
                gl.store(p_out + HALF, (high * share).to(out.dtype.element_ty), mask=m_o[:, None])


@gluon.jit
def _hopper_attention_kernel(
    k_desc, v_desc, q, out, lse, cos, sin, page_indices, lists,
    stride_row, stride_head, stride_d, stride_out, stride_out_head, stride_lse, stride_table,
    scale,
    DECODE: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, ROTARY_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr,
    INTERLEAVED: gl.constexpr, WORKERS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    AWAITED: gl.constexpr,
):  # fmt: skip
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    HALVES: gl.constexpr = HEAD_DIM // HALF
    dtype = k_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [WORKERS * HALVES, ROWS, HALF], SHARED)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES * HALVES, KEYS, HALF], SHARED)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES * HALVES, KEYS, HALF], SHARED)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=WORKERS)
        mbarrier.init(v_empty.index(stage), count=WORKERS)
    fence_async_shared()
    wait_for_group()
    barriers = (k_full, k_empty, v_full, v_empty)
    queries = (q, stride_row, stride_head, stride_d, scale)
    rotation = (cos, sin, stride_table)
    outputs = (out, lse, stride_out, stride_out_head, stride_lse)
    fetched = (k_desc, v_desc, k_tiles, v_tiles, barriers, page_indices, lists)
    data = (queries, rotation, outputs, q_tiles, k_tiles, v_tiles, barriers, lists)
    if WORKERS == 2:
        gl.warp_specialize(
            [
                (_compute, (
                    data, 0, DECODE, NUM_KV_HEADS, GROUP, HEAD_DIM, ROTARY_DIM, PAGE_SIZE,
                    INTERLEAVED, S_LAYOUT, O_LAYOUT, WORKERS, KEYS, STAGES, AWAITED,
                )),
                (_compute, (
                    data, 1, DECODE, NUM_KV_HEADS, GROUP, HEAD_DIM, ROTARY_DIM, PAGE_SIZE,
                    INTERLEAVED, S_LAYOUT, O_LAYOUT, WORKERS, KEYS, STAGES, AWAITED,
                )),
                (_fetch, (
                    fetched, DECODE, NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE, SHARED, WORKERS,
                    KEYS, STAGES, AWAITED,
                )),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_compute, (
                    data, 0, DECODE, NUM_KV_HEADS, GROUP, HEAD_DIM, ROTARY_DIM, PAGE_SIZE,
                    INTERLEAVED, S_LAYOUT, O_LAYOUT, WORKERS, KEYS, STAGES, AWAITED,
                )),
                (_fetch, (
                    fetched, DECODE, NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE, SHARED, WORKERS,
                    KEYS, STAGES, AWAITED,
                )),
            ],
            [1], [24],
        )  # fmt: skip


def _descriptor(pages: Tensor) -> TensorDescriptor:
    """Pages as rows of keys, fetched a page and 64 dims at a time."""
    layout = gl.NVMMASharedLayout(128, 16, 2)
    rows = pages.view(-1, pages.shape[3])
    return TensorDescriptor.from_tensor(rows, [pages.shape[2], HALF.value], layout)


class Grid(NamedTuple):
    """How many programs with how many computing groups; ``awaited``: the kernel before this one is
    of the same kind and has waited for whatever wrote the queries and the pages."""

    programs: int
    num_groups: int
    awaited: bool = False


def sizes(head_dim: int, num_groups: int) -> tuple[int, int, int | None]:
    """Keys of a tile, tiles in a ring and registers of a thread.

    With one computing group two programs share a multiprocessor, with two there is one.
    """
    if num_groups == 2:
        return 128, 2, None
    return 64, 3 if head_dim == 128 else 4, 128


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
    """Run over a work list (eleven arrays) or a span list (ten), writing ``state``.

    Of a work list: first and end item, page and entry prefix sums of items, row, offset, bound and
    state of entries, positions of pages and rows, heads of items, as `_unit` counts them.
    """
    k_pages, v_pages = pages
    out, lse = state
    num_kv_heads, page_size, head_dim = k_pages.shape[1:]
    keys, stages, registers = sizes(head_dim, grid.num_groups)
    _hopper_attention_kernel[(grid.programs,)](
        _descriptor(k_pages), _descriptor(v_pages), q, out, lse, *table(rotation),
        page_indices, lists, *q.stride(), *out.stride()[:2], lse.stride(0),
        rotation.cos.stride(0), rule.softmax_scale * LOG2_E.value,
        DECODE=len(lists) == 11, NUM_KV_HEADS=num_kv_heads,
        GROUP=q.shape[1] // num_kv_heads, HEAD_DIM=head_dim, ROTARY_DIM=rotation.rotary_dim,
        PAGE_SIZE=page_size, INTERLEAVED=rotation.interleaved, WORKERS=grid.num_groups,
        KEYS=keys, STAGES=stages, AWAITED=grid.awaited,
        num_warps=4, maxnreg=registers, enable_fp_fusion=True, launch_pdl=True,
    )  # fmt: skip

"""Queries turned for all spans in one launch, and attention that fetches them as it does keys.

Units, rings and running states are those of `looseleaf.ops.hopper_attention.kernel`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from looseleaf.ops.hopper_attention.kernel import (
    LN_2,
    OLD_NAMES,
    _descriptor,
    _num_slots,
    _num_units,
    _rows_of,
    _unit,
    load_tile,
    sizes,
)
from looseleaf.ops.hopper_tiles.kernel import HALF, ROWS, fold_span, plain_end_of, wait_for_group
from looseleaf.ops.rotate.kernel import load_rotated, table
from looseleaf.ops.scores.kernel import scaled_query
from looseleaf.types import Rotation, ScoreRule

_WORKERS = 2
_QUERY_STAGES = gl.constexpr(2)


@triton.jit
def _turn_queries_kernel(
    q, turned, cos, sin, span_offset, row_positions,
    num_rows, stride_q_row, stride_q_head, stride_q_d, stride_table, softmax_scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Packed rows of one KV head for one span: ``turned`` is ``[span, kv_head, row, group, d]``."""
    span, kv_head = tl.program_id(1), tl.program_id(2)
    packed = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_row = packed < num_rows * GROUP
    row, head = (packed // GROUP).to(tl.int64), kv_head * GROUP + packed % GROUP
    position = tl.load(row_positions + row, mask=m_row, other=0) - tl.load(span_offset + span)
    # a row before the frame sees nothing in it, and has no angle there
    b_q = load_rotated(
        q + row * stride_q_row + head * stride_q_head, stride_q_d, tl.maximum(position, 0),
        cos, sin, stride_table, m_row, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_D,
    )  # fmt: skip
    b_q = scaled_query(b_q, softmax_scale, 0.0, False).to(turned.dtype.element_ty)
    o_d = tl.arange(0, BLOCK_D)
    first = (span * NUM_KV_HEADS + kv_head).to(tl.int64) * num_rows * GROUP
    p_turned = turned + (first + packed)[:, None] * HEAD_DIM + o_d[None, :]
    tl.store(p_turned, b_q, mask=m_row[:, None] & (o_d < HEAD_DIM)[None, :])


def turn_queries(
    q: Tensor, num_kv_heads: int, lists: tuple[Tensor, Tensor], rotation: Rotation, rule: ScoreRule
) -> Tensor:
    """``q [rows, heads, d]`` as every span sees it, scaled for scores in base 2: ``[spans,
    kv_heads, rows, group, d]``; ``lists`` are the offsets of spans and the positions of rows."""
    rows, heads, head_dim = q.shape
    span_offset, row_positions = lists
    group, spans = heads // num_kv_heads, len(span_offset)
    size = (spans, num_kv_heads, rows, group, head_dim)
    turned = torch.empty(size, dtype=q.dtype, device=q.device)
    block_d = triton.next_power_of_2(head_dim)
    grid = (triton.cdiv(rows * group, 32), spans, num_kv_heads)
    _turn_queries_kernel[grid](
        q, turned, *table(rotation), span_offset, row_positions, rows, *q.stride(),
        rotation.cos.stride(0), rule.softmax_scale, NUM_KV_HEADS=num_kv_heads, GROUP=group,
        HEAD_DIM=head_dim, ROTARY_DIM=rotation.rotary_dim, INTERLEAVED=rotation.interleaved,
        BLOCK_M=32, BLOCK_D=block_d, enable_fp_fusion=True,
    )  # fmt: skip
    return turned


@gluon.jit
def _fetch_ahead(
    data,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr, SHARED: gl.constexpr, WORKERS: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The fetching warp: the queries of every span, then its tiles of keys and values."""
    q_desc, k_desc, v_desc, q_tiles, k_pages, v_pages, barriers, page_indices, lists, rows = data
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    HALVES: gl.constexpr = HEAD_DIM // HALF
    RUN: gl.constexpr = KEYS // PAGE_SIZE
    count, spans_read = 0, 0
    num_units = _num_units(lists, False, NUM_KV_HEADS)
    gdc_wait()
    gdc_launch_dependents()
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        kv_head, first, num_packed, begin, end = _unit(lists, unit, False, NUM_KV_HEADS, GROUP)
        for block in range(0, num_packed, WORKERS * ROWS):
            last = first + (gl.minimum(block + WORKERS * ROWS, num_packed) - 1) // GROUP
            for span in range(begin, end):
                first_page, num_pages, num_slots = _num_slots(
                    lists, span, first, last, False, PAGE_SIZE
                )
                if num_slots > 0:
                    turn, turn_phase = spans_read % _QUERY_STAGES, (spans_read // _QUERY_STAGES) & 1
                    mbarrier.wait(q_empty.index(turn), turn_phase ^ 1)
                    mbarrier.expect(q_full.index(turn), WORKERS * ROWS * HEAD_DIM * 2)
                    # rows past the tile are those of others, or zeros: nobody looks
                    start_row = ((span * NUM_KV_HEADS + kv_head) * rows + first) * GROUP + block
                    for worker in gl.static_range(WORKERS):
                        for half in gl.static_range(HALVES):
                            load_tile(
                                q_desc, [start_row + worker * ROWS, half * HALF],
                                q_full.index(turn),
                                q_tiles.index((turn * WORKERS + worker) * HALVES + half),
                            )  # fmt: skip
                    spans_read += 1
                for start in range(0, num_slots, KEYS):
                    stage, phase = count % STAGES, (count // STAGES) & 1
                    mbarrier.wait(k_empty.index(stage), phase ^ 1)
                    mbarrier.expect(k_full.index(stage), KEYS * HEAD_DIM * 2)
                    _fetch_run(
                        k_desc, k_pages, k_full.index(stage), page_indices + first_page, start,
                        num_pages, kv_head, stage, NUM_KV_HEADS, PAGE_SIZE, HALVES, RUN,
                    )  # fmt: skip
                    mbarrier.wait(v_empty.index(stage), phase ^ 1)
                    mbarrier.expect(v_full.index(stage), KEYS * HEAD_DIM * 2)
                    _fetch_run(
                        v_desc, v_pages, v_full.index(stage), page_indices + first_page, start,
                        num_pages, kv_head, stage, NUM_KV_HEADS, PAGE_SIZE, HALVES, RUN,
                    )  # fmt: skip
                    count += 1


@gluon.jit
def _fetch_run(
    desc, tiles, barrier, page_indices, start, num_pages, kv_head, stage,
    NUM_KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, HALVES: gl.constexpr, RUN: gl.constexpr,
):  # fmt: skip
    """The pages of one tile; past the run some page of it once more, and nobody looks."""
    for n in gl.static_range(RUN):
        ordinal = gl.minimum(start // PAGE_SIZE + n, num_pages - 1)
        row = (gl.load(page_indices + ordinal) * NUM_KV_HEADS + kv_head) * PAGE_SIZE
        for half in gl.static_range(HALVES):
            place = (stage * HALVES + half) * RUN + n
            load_tile(desc, [row, half * HALF], barrier, tiles.index(place))


@gluon.jit
def _compute_ahead(
    data,
    WORKER: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, S_LAYOUT: gl.constexpr,
    O_LAYOUT: gl.constexpr, SHARED: gl.constexpr, WORKERS: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """A computing group: 64 packed rows of every unit."""
    outputs, q_stages, k_tiles, v_tiles, barriers, lists = data
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    out, lse, stride_out, stride_out_head, stride_lse = outputs
    HALVES: gl.constexpr = HEAD_DIM // HALF
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    count, spans_read = 0, 0
    num_units = _num_units(lists, False, NUM_KV_HEADS)
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        kv_head, first, num_packed, begin, end = _unit(lists, unit, False, NUM_KV_HEADS, GROUP)
        for block in range(0, num_packed, WORKERS * ROWS):
            local = block + WORKER * ROWS
            last = first + (gl.minimum(block + WORKERS * ROWS, num_packed) - 1) // GROUP
            m_s, place_s, row_s, head_s = _rows_of(
                lists, first, local, num_packed, kv_head, False, GROUP, S_ROW
            )
            true_s = gl.load(lists[9] + row_s, mask=m_s, other=0)
            peak = gl.full([ROWS], float("-inf"), gl.float32, layout=S_ROW)
            total = gl.zeros([ROWS], gl.float32, layout=S_ROW)
            low = gl.zeros([ROWS, HALF], gl.float32, layout=O_LAYOUT)
            high = gl.zeros([ROWS, HALF], gl.float32, layout=O_LAYOUT)
            for span in range(begin, end):
                first_page, num_pages, num_slots = _num_slots(
                    lists, span, first, last, False, PAGE_SIZE
                )
                if num_slots > 0:
                    offset, length = gl.load(lists[5] + span), gl.load(lists[6] + span)
                    bound = gl.where(m_s, gl.minimum(true_s - offset + 1, length), 0)
                    least_bound = gl.min(gl.where(m_s, bound, 2147483647), 0)
                    plain_end = plain_end_of(
                        lists, first_page, num_pages, least_bound, False, PAGE_SIZE
                    )
                    turn, turn_phase = spans_read % _QUERY_STAGES, (spans_read // _QUERY_STAGES) & 1
                    if OLD_NAMES:
                        q_tiles = q_stages.index(turn)._reinterpret(
                            k_tiles.dtype, [WORKERS * HALVES, ROWS, HALF], SHARED
                        )
                    else:
                        q_tiles = q_stages.index(turn).reinterpret(
                            k_tiles.dtype, [WORKERS * HALVES, ROWS, HALF], SHARED
                        )
                    mbarrier.wait(q_full.index(turn), turn_phase)
                    low, high, peak, total, count = fold_span(
                        q_tiles, k_tiles, v_tiles, (k_full, k_empty, v_full, v_empty), low, high,
                        peak, total, count, lists,
                        (first_page, num_slots, plain_end, bound, num_slots),
                        WORKER, False, HEAD_DIM, PAGE_SIZE, KEYS, STAGES, S_LAYOUT, O_LAYOUT,
                    )  # fmt: skip
                    wait_for_group()
                    mbarrier.arrive(q_empty.index(turn), count=1)
                    spans_read += 1
            empty = total == 0.0
            total = gl.where(empty, 1.0, total)
            b_lse = gl.where(empty, float("-inf"), (peak + gl.log2(total)) * LN_2)
            share = gl.convert_layout(1.0 / total, O_ROW)[:, None]
            m_o, place_o, _, head_o = _rows_of(
                lists, first, local, num_packed, kv_head, False, GROUP, O_ROW
            )
            gdc_wait()
            gl.store(lse + place_s.to(gl.int64) * stride_lse + head_s, b_lse, mask=m_s)
            p_out = out + place_o.to(gl.int64) * stride_out + head_o * stride_out_head
            o_d = gl.arange(0, HALF, layout=gl.SliceLayout(0, O_LAYOUT))
            p_out = p_out[:, None] + o_d[None, :]
            gl.store(p_out, (low * share).to(out.dtype.element_ty), mask=m_o[:, None])
            if HALVES == 2:
                gl.store(p_out + HALF, (high * share).to(out.dtype.element_ty), mask=m_o[:, None])


@gluon.jit
def _hopper_prefill_kernel(
    q_desc, k_desc, v_desc, out, lse, page_indices, lists, rows,
    stride_out, stride_out_head, stride_lse,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr, WORKERS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    HALVES: gl.constexpr = HEAD_DIM // HALF
    PAGES: gl.constexpr = STAGES * HALVES * (KEYS // PAGE_SIZE)
    TURNED: gl.constexpr = _QUERY_STAGES * WORKERS * HALVES
    dtype = k_desc.dtype
    q_stages = gl.allocate_shared_memory(
        dtype, [_QUERY_STAGES, WORKERS * HALVES * ROWS, HALF], SHARED
    )
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES * HALVES, KEYS, HALF], SHARED)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES * HALVES, KEYS, HALF], SHARED)
    q_full = gl.allocate_shared_memory(gl.int64, [_QUERY_STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [_QUERY_STAGES, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_QUERY_STAGES):
        mbarrier.init(q_full.index(stage), count=1)
        mbarrier.init(q_empty.index(stage), count=WORKERS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=WORKERS)
        mbarrier.init(v_empty.index(stage), count=WORKERS)
    fence_async_shared()
    wait_for_group()
    if OLD_NAMES:
        q_tiles = q_stages._reinterpret(dtype, [TURNED, ROWS, HALF], SHARED)
        k_pages = k_tiles._reinterpret(dtype, [PAGES, PAGE_SIZE, HALF], SHARED)
        v_pages = v_tiles._reinterpret(dtype, [PAGES, PAGE_SIZE, HALF], SHARED)
    else:
        q_tiles = q_stages.reinterpret(dtype, [TURNED, ROWS, HALF], SHARED)
        k_pages = k_tiles.reinterpret(dtype, [PAGES, PAGE_SIZE, HALF], SHARED)
        v_pages = v_tiles.reinterpret(dtype, [PAGES, PAGE_SIZE, HALF], SHARED)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    outputs = (out, lse, stride_out, stride_out_head, stride_lse)
    fetched = (
        q_desc, k_desc, v_desc, q_tiles, k_pages, v_pages, barriers, page_indices, lists, rows,
    )  # fmt: skip
    data = (outputs, q_stages, k_tiles, v_tiles, barriers, lists)
    gl.warp_specialize(
        [
            (_compute_ahead, (
                data, 0, NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE, S_LAYOUT, O_LAYOUT, SHARED,
                WORKERS, KEYS, STAGES,
            )),
            (_compute_ahead, (
                data, 1, NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE, S_LAYOUT, O_LAYOUT, SHARED,
                WORKERS, KEYS, STAGES,
            )),
            (_fetch_ahead, (
                fetched, NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE, SHARED, WORKERS, KEYS, STAGES,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


def launch_ahead(
    turned: Tensor,
    pages: tuple[Tensor, Tensor],
    lists: tuple[Tensor, ...],
    page_indices: Tensor,
    state: tuple[Tensor, Tensor],
    programs: int,
) -> None:
    """Attention of ``turned`` queries over a span list (ten arrays, as `_unit` counts them)."""
    out, lse = state
    _, num_kv_heads, rows, group, head_dim = turned.shape
    layout = gl.NVMMASharedLayout(128, 16, 2)
    flat = turned.view(-1, head_dim)
    queries = TensorDescriptor.from_tensor(flat, [ROWS.value, HALF.value], layout)
    keys, stages, _ = sizes(head_dim, _WORKERS)
    _hopper_prefill_kernel[(programs,)](
        queries, _descriptor(pages[0]), _descriptor(pages[1]), out, lse, page_indices, lists,
        rows, *out.stride()[:2], lse.stride(0), NUM_KV_HEADS=num_kv_heads, GROUP=group,
        HEAD_DIM=head_dim, PAGE_SIZE=pages[0].shape[2], WORKERS=_WORKERS, KEYS=keys,
        STAGES=stages, num_warps=4, enable_fp_fusion=True, launch_pdl=True,
    )  # fmt: skip

"""Prefill attention on the device: one program per tile, KV head and set of row blocks.

Query heads of a KV head are packed into rows ("packed row" = row × query head). A packed row is
rotated once per span; keys are never rotated. Tiles of keys after all rows of a block, or outside
their window, are not loaded. Keys that every row sees are loaded without masks."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.hopper import attention as hopper_attention
from looseleaf.ops.merge_states import merge_states
from looseleaf.ops.page_dtypes import FP8, same_memory
from looseleaf.ops.prefill_attention.span_list import SpanList
from looseleaf.ops.prefill_attention.units import UNIT_NUMBERS
from looseleaf.ops.rotate.kernel import table
from looseleaf.ops.scores.kernel import (
    finish,
    fold_tile,
    is_shown,
    latent_blocks,
    read_tile,
    scaled_rows,
    slots_of_tile,
    store_zeros,
    tile_stages,
)
from looseleaf.types import AttnState, Rotation, ScoreRule


@triton.jit
def _prefill_attention_kernel(
    q, k_pages, v_pages, out, lse, cos, sin, slopes, slot_positions,
    num_tiles, tile_row_indptr, tile_request, request_span_indptr,
    span_page_indptr, span_offset, span_length, span_explicit, span_mask,
    page_indices, mask_words, row_positions,
    stride_q_row, stride_q_head, stride_q_d,
    stride_page, stride_page_head, stride_slot, stride_d,
    stride_out_row, stride_out_part, stride_out_head, stride_lse_row, stride_lse_part,
    stride_table, stride_positions, softmax_scale, soft_cap, window,
    PARTS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, INTERLEAVED: tl.constexpr, CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr, WIDENED: tl.constexpr, HAS_VALUES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    # the first dim with a value: latent keys, and keys expanded from them, rotate in dims before
    FIRST: tl.constexpr = ROTARY_DIM if BLOCK_T > 0 else 0
    DTYPE: tl.constexpr = q.dtype.element_ty if WIDENED else k_pages.dtype.element_ty
    # the last rows read the most keys: their tiles start first to balance the end
    tile = tl.load(num_tiles) - 1 - tl.program_id(1)
    if tile < 0:
        return
    kv_head, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    first_row = tl.load(tile_row_indptr + tile)
    num_packed = (tl.load(tile_row_indptr + tile + 1) - first_row) * GROUP
    request = tl.load(tile_request + tile)
    first_span = tl.load(request_span_indptr + request)
    end_span = tl.load(request_span_indptr + request + 1)
    o_m, o_n, o_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    m_d = (o_d < HEAD_DIM - FIRST)[None, :]
    k_head, v_head = k_pages + kv_head * stride_page_head, v_pages + kv_head * stride_page_head

    for first in range(tl.program_id(2) * BLOCK_M, num_packed, tl.num_programs(2) * BLOCK_M):
        m_row = first + o_m < num_packed
        row = first_row + (first + o_m) // GROUP
        head = kv_head * GROUP + (first + o_m) % GROUP
        row_position = tl.load(row_positions + row, mask=m_row, other=0)
        # rows are sorted by position
        earliest = tl.load(row_positions + first_row + first // GROUP)
        latest = tl.max(row_position, 0)
        row = row.to(tl.int64)
        p_q = q + row * stride_q_row + head * stride_q_head
        slope = None
        if slopes is not None:
            slope = tl.load(slopes + head, mask=m_row, other=0.0)

        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        for span in range(first_span, end_span):
            first_page = tl.load(span_page_indptr + span)
            offset = tl.load(span_offset + span)
            explicit = tl.load(span_explicit + span)
            frame_position = row_position - offset
            end = tl.load(span_length + span)
            begin, plain_end = 0, 0
            if explicit == 0:
                end = tl.minimum(end, latest - offset + 1)
                if WINDOWED:
                    begin = tl.maximum(earliest - offset - window + 1, 0) // BLOCK_N * BLOCK_N
                    plain_end = begin
                else:
                    plain_end = tl.maximum(tl.minimum(end, earliest - offset + 1), 0)
                    plain_end = plain_end // BLOCK_N * BLOCK_N
            if mask_words is not None:
                first_word = tl.load(span_mask + span)
            if PARTS > 1:
                num_blocks = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N)
                end = tl.minimum(end, begin + num_blocks * (part + 1) // PARTS * BLOCK_N)
                begin += num_blocks * part // PARTS * BLOCK_N
                plain_end = tl.minimum(tl.maximum(plain_end, begin), tl.maximum(end, begin))
            if begin < end:
                # a row before the frame sees no key in it: any angle is correct
                b_q, b_turned = scaled_rows(
                    p_q, stride_q_d, tl.maximum(frame_position, 0), cos, sin, stride_table, m_row,
                    softmax_scale, soft_cap, DTYPE, CAPPED, HEAD_DIM, ROTARY_DIM, INTERLEAVED,
                    BLOCK_D, BLOCK_T,
                )  # fmt: skip  # [M, D], [M, T]
                for start in range(begin, plain_end, BLOCK_N):
                    ordinal, slot = slots_of_tile(start, o_n, PAGE_SIZE, BLOCK_N)
                    page = tl.load(page_indices + first_page + ordinal).to(tl.int64)
                    distance = None
                    if slopes is not None:
                        distance = frame_position[:, None] - (start + o_n)[None, :]
                    o_key, shown = page * stride_page + slot * stride_slot, None
                    if mask_words is not None:
                        # all rows of a request share a span's bitmap
                        shown = is_shown(mask_words, first_word, start + o_n)
                    scores, b_v = read_tile(
                        b_q, b_turned, k_head + o_key, v_head + o_key, stride_d, shown, distance,
                        soft_cap, slope, CAPPED, HEAD_DIM, ROTARY_DIM, BLOCK_D, BLOCK_T, HAS_VALUES,
                    )  # fmt: skip
                    if shown is not None:
                        scores = tl.where(shown[None, :], scores, float("-inf"))
                    acc, peak, total = fold_tile(
                        scores, b_v.to(b_q.dtype), acc, peak, total, mask_words is not None
                    )

                for start in range(plain_end, end, BLOCK_N):
                    position = start + o_n
                    in_span = position < end
                    ordinal, slot = slots_of_tile(start, o_n, PAGE_SIZE, BLOCK_N)
                    p_page = page_indices + first_page + ordinal
                    page = tl.load(p_page, mask=in_span, other=0).to(tl.int64)
                    if slot_positions is not None:
                        p_position = slot_positions + page * stride_positions + slot
                        m_explicit = in_span & (explicit + tl.zeros_like(slot) != 0)
                        b_position = tl.load(p_position, mask=m_explicit, other=-1)
                        position = tl.where(m_explicit, b_position, position)
                    # keys that no row sees are not loaded: their page is undefined
                    seen = in_span & (position >= 0) & (position <= latest - offset)
                    if mask_words is not None:
                        seen &= is_shown(mask_words, tl.where(seen, first_word, -1), position)
                    distance = frame_position[:, None] - position[None, :]
                    visible = seen[None, :] & m_row[:, None] & (distance >= 0)  # [M, N]
                    if WINDOWED:
                        visible &= distance < window
                        seen = tl.max(visible.to(tl.int32), 0) > 0

                    o_key = page * stride_page + slot * stride_slot
                    scores, b_v = read_tile(
                        b_q, b_turned, k_head + o_key, v_head + o_key, stride_d, seen, distance,
                        soft_cap, slope, CAPPED, HEAD_DIM, ROTARY_DIM, BLOCK_D, BLOCK_T, HAS_VALUES,
                    )  # fmt: skip
                    scores = tl.where(visible, scores, float("-inf"))
                    acc, peak, total = fold_tile(scores, b_v.to(b_q.dtype), acc, peak, total, True)

        b_out, b_lse = finish(acc, peak, total)
        p_out = out + row * stride_out_row + part * stride_out_part + head * stride_out_head
        tl.store(p_out[:, None] + FIRST + o_d[None, :], b_out, mask=m_row[:, None] & m_d)
        if BLOCK_T > 0:
            store_zeros(p_out, m_row, FIRST, BLOCK_T)
        tl.store(lse + row * stride_lse_row + part * stride_lse_part + head, b_lse, mask=m_row)


def prefill_attention_triton(
    q: Float[Tensor, "rows qo_heads head_dim"],
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    v_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    spans: SpanList,
    rotation: Rotation,
    rule: ScoreRule,
    slot_positions: Int[Tensor, "pages page_size"] | None = None,
) -> AttnState:
    """See `looseleaf.ops.prefill_attention`."""
    rows, num_qo_heads, head_dim = q.shape
    num_kv_heads, page_size = k_pages.shape[1:3]
    tiles, group = spans.tile_request.shape[0], num_qo_heads // num_kv_heads
    if not tiles or not rows:
        return AttnState(*_empty_states(spans, q.shape, q))
    assert slot_positions is None or slot_positions.stride(1) == 1, "slots must be contiguous"
    assert k_pages.stride() == v_pages.stride(), "K and V pages must be laid out alike"
    has_patches = slot_positions is not None or spans.mask_words.numel() > 0
    supported = not has_patches or spans.row_patch_bounds is not None
    if (
        supported
        and spans.unit_numbers is not None
        and not same_memory(k_pages, v_pages)
        and hopper_attention.serves(k_pages, rule, spans=True)
    ):
        return _attend_units(q, (k_pages, v_pages), spans, rotation, rule)
    block_d, block_t = triton.next_power_of_2(head_dim), 0
    latent = same_memory(k_pages, v_pages)
    if latent or spans.value_start:
        block_d, block_t = latent_blocks(rotation, head_dim)
    tile = tile_shape(rows * group / tiles, block_d, k_pages.element_size(), latent=latent)
    block_m, block_n, num_warps, num_stages = tile
    # only the device has the rows of each tile: programs loop over blocks beyond the grid
    row_programs = min(group, triton.cdiv(rows * group, block_m))
    parts = spans.parts
    if parts > 1:
        fp32 = q.new_empty(0, dtype=torch.float32)
        out, lse = _empty_states(spans, (rows, parts, *q.shape[1:]), fp32)
    else:
        out, lse = _empty_states(spans, q.shape, q)
    stride_part, stride_lse_part = (out.stride(1), lse.stride(1)) if parts > 1 else (0, 0)
    _prefill_attention_kernel[(num_kv_heads * parts, tiles, row_programs)](
        q, k_pages, v_pages, out, lse, *table(rotation), rule.alibi_slopes, slot_positions,
        spans.num_tiles, spans.tile_row_indptr, spans.tile_request, spans.request_span_indptr,
        spans.span_page_indptr, spans.span_offset, spans.span_length, spans.span_explicit,
        spans.span_mask, spans.page_indices,
        spans.mask_words if spans.mask_words.numel() else None, spans.row_positions,
        *q.stride(), *k_pages.stride(), out.stride(0), stride_part, out.stride(-2),
        lse.stride(0), stride_lse_part, rotation.cos.stride(0),
        slot_positions.stride(0) if slot_positions is not None else 0,
        rule.softmax_scale, rule.soft_cap, rule.window,
        PARTS=parts, GROUP=group, HEAD_DIM=head_dim, ROTARY_DIM=rotation.rotary_dim,
        PAGE_SIZE=page_size, INTERLEAVED=rotation.interleaved, CAPPED=rule.soft_cap != 0,
        WINDOWED=rule.window != 0, WIDENED=k_pages.dtype is FP8, HAS_VALUES=not latent,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, BLOCK_T=block_t,
        num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    if parts == 1:
        return AttnState(out, lse)
    indptr = torch.arange(0, rows * parts + 1, parts, dtype=torch.int32, device=q.device)
    states = AttnState(out.flatten(0, 1), lse.flatten(0, 1))
    return merge_states(states, indptr, out=torch.empty_like(q))


def _attend_units(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    spans: SpanList,
    rotation: Rotation,
    rule: ScoreRule,
) -> AttnState:
    """Runs the Hopper kernel and merges the states of cut tiles."""
    from looseleaf.ops.hopper.attention.kernel import Grid, launch

    assert spans.unit_numbers is not None, "a list with units has them"
    lists = _unit_arrays(spans)
    programs = spans.unit_numbers.shape[0] // UNIT_NUMBERS * pages[0].shape[1]
    # persistent programs: the start of a program costs as much as several tiles of keys
    num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    programs = min(programs, num_sms * hopper_attention.PROGRAMS[spans.groups])
    if spans.num_states:
        out = q.new_empty((spans.num_states, *q.shape[1:]), dtype=torch.float32)
        state = AttnState(out, out.new_empty(out.shape[:2]))
    else:
        state = AttnState(*_empty_states(spans, q.shape, q))
    grid = Grid(programs, spans.groups, in_parts=spans.num_states > 0)
    launch(q, pages, lists, spans.page_indices, state, rotation, rule, grid)
    if not spans.num_states:
        return state
    assert spans.row_state_indptr is not None
    # few_states changes bits with the number of rows; batch-invariant steps have no cut tiles
    out, indptr = torch.empty_like(q), spans.row_state_indptr
    return merge_states(state, indptr, out=out, few_states=True, indptr_ready=True)


def _empty_states(spans: SpanList, shape: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised or empty outputs of ``shape``, like ``like``, and their fp32 lse."""
    if spans.complete and spans.tile_request.numel():
        out = like.new_empty(tuple(shape))
        return out, out.new_empty(shape[:-1], dtype=torch.float32)
    # rows outside of all tiles are padding: they get the empty state
    out = like.new_zeros(tuple(shape))
    return out, out.new_full(shape[:-1], -torch.inf, dtype=torch.float32)


def tile_shape(
    packed_rows: float, block_d: int, itemsize: int, *, latent: bool = False
) -> tuple[int, int, int, int]:
    """``BLOCK_M``, ``BLOCK_N``, warps and stages for tiles with ``packed_rows`` packed rows on
    average."""
    if latent:
        # the keys' tile is the values' tile
        block_m, block_n = (64, 32) if itemsize < 4 else (32, 16)
        block_m = max(16, min(block_m, triton.next_power_of_2(round(packed_rows))))
        return block_m, block_n, 8 if block_m > 16 else 4, 2
    max_block = (128 if itemsize < 4 else 32) // (1 if block_d <= 128 else 2)
    block_m = max(16, min(max_block, triton.next_power_of_2(round(packed_rows))))
    block_n = min(max_block, 64)
    num_warps = 8 if block_m * block_d > 8192 else 4
    return block_m, block_n, num_warps, tile_stages(block_n, block_d, itemsize)


def _unit_arrays(spans: SpanList) -> tuple[Tensor, ...]:
    """The arrays of a span list in the order of the Hopper kernel."""
    assert spans.num_units is not None
    assert spans.unit_numbers is not None
    arrays = (
        spans.num_units, spans.unit_numbers, spans.span_page_indptr, spans.span_offset,
        spans.span_length, spans.span_explicit, spans.span_mask, spans.row_positions,
    )  # fmt: skip
    if spans.row_patch_bounds is None:
        return arrays
    return (*arrays, spans.mask_words, spans.row_patch_bounds)

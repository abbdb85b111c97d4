"""Attention received on the device: one program per KV head and block of keys of one span.

A program reads all rows of the span's request, rotated to the span's frame, and keeps the largest
weight of every key. The maximum over KV heads is taken at the end."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.attention_received.readers import Readers
from looseleaf.ops.page_dtypes import FP8
from looseleaf.ops.prefill_attention.span_list import SpanList
from looseleaf.ops.rotate.kernel import table
from looseleaf.ops.scores.kernel import (
    LOG2_E,
    is_shown,
    latent_blocks,
    scaled_rows,
    score_tile,
    score_turned,
    slots_of_tile,
)
from looseleaf.types import Rotation, ScoreRule


# compiled once for all numbers of keys, spans and requests
@triton.jit(do_not_specialize=["num_spans", "num_requests", "stride_received"])
def _attention_received_kernel(
    q, lse, k_pages, received, cos, sin, slopes, weights, before,
    num_tiles, tile_row_indptr, tile_request, request_span_indptr,
    span_page_indptr, span_offset, span_length, span_mask,
    page_indices, mask_words, row_positions, num_spans, num_requests,
    stride_q_row, stride_q_head, stride_q_d,
    stride_page, stride_page_head, stride_slot, stride_d,
    stride_lse_row, stride_received, stride_table,
    softmax_scale, soft_cap, window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, INTERLEAVED: tl.constexpr, CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr, WIDENED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    # wide heads are read in two blocks: their rotated dims, and the others
    FIRST: tl.constexpr = ROTARY_DIM if BLOCK_T > 0 else 0
    DTYPE: tl.constexpr = q.dtype.element_ty if WIDENED else k_pages.dtype.element_ty
    kv_head = tl.program_id(0)
    # the span of this block, and its index in the span: blocks are numbered span by span
    block, span, first_key = tl.program_id(1), 0, 0
    length = tl.load(span_length)
    while (span < num_spans - 1) & (block >= tl.cdiv(length, BLOCK_N)):
        block -= tl.cdiv(length, BLOCK_N)
        first_key += length
        span += 1
        length = tl.load(span_length + span)
    start = block * BLOCK_N
    if start >= length:
        return
    request = 0
    while (request < num_requests - 1) & (span >= tl.load(request_span_indptr + request + 1)):
        request += 1
    offset, first_word = tl.load(span_offset + span), tl.load(span_mask + span)
    o_m, o_n, o_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    position = start + o_n
    in_span = position < length
    ordinal, slot = slots_of_tile(start, o_n, PAGE_SIZE, BLOCK_N)
    p_page = page_indices + tl.load(span_page_indptr + span) + ordinal
    page = tl.load(p_page, mask=in_span, other=0).to(tl.int64)
    p_k = k_pages + kv_head * stride_page_head + page * stride_page + slot * stride_slot
    m_k = in_span[:, None] & (o_d < HEAD_DIM - FIRST)[None, :]
    b_k = tl.load(p_k[:, None] + ((FIRST + o_d) * stride_d)[None, :], mask=m_k, other=0.0)  # [N, D]

    shown = in_span
    if mask_words is not None:
        shown &= is_shown(mask_words, tl.where(in_span, first_word, -1), position)
    best = tl.zeros((BLOCK_N,), tl.float32)
    for tile in range(tl.load(num_tiles)):
        first_row = tl.load(tile_row_indptr + tile)
        num_packed = (tl.load(tile_row_indptr + tile + 1) - first_row) * GROUP
        num_packed = tl.where(tl.load(tile_request + tile) == request, num_packed, 0)
        for first in range(0, num_packed, BLOCK_M):
            m_row = first + o_m < num_packed
            row = first_row + (first + o_m) // GROUP
            head = kv_head * GROUP + (first + o_m) % GROUP
            frame_position = tl.load(row_positions + row, mask=m_row, other=0) - offset
            slope = None
            if slopes is not None:
                slope = tl.load(slopes + head, mask=m_row, other=0.0)
            limit = tl.load(before + row, mask=m_row, other=0) - offset
            distance = frame_position[:, None] - position[None, :]
            visible = shown[None, :] & m_row[:, None] & (distance >= 0)  # [M, N]
            visible &= position[None, :] < limit[:, None]
            if WINDOWED:
                visible &= distance < window
            row = row.to(tl.int64)
            b_q, b_turned = scaled_rows(
                q + row * stride_q_row + head * stride_q_head, stride_q_d,
                tl.maximum(frame_position, 0), cos, sin, stride_table, m_row, softmax_scale,
                soft_cap, DTYPE, CAPPED, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_D, BLOCK_T,
            )  # fmt: skip  # [M, D], [M, T]
            products = None
            if BLOCK_T > 0:
                products = score_turned(b_turned, p_k, stride_d, in_span, ROTARY_DIM, BLOCK_T)
            scores = score_tile(b_q, b_k, distance, soft_cap, slope, CAPPED, products)
            # a row without keys has only hidden keys here: any finite pivot is correct
            pivot = tl.load(lse + row * stride_lse_row + head, mask=m_row, other=0.0) * LOG2_E
            pivot = tl.where(pivot == float("-inf"), 0.0, pivot)
            weight = tl.load(weights + row, mask=m_row, other=0.0)
            share = tl.exp2(scores - pivot[:, None]) * weight[:, None]
            best = tl.maximum(best, tl.max(tl.where(visible, share, 0.0), 0))
    p_received = received + kv_head.to(tl.int64) * stride_received + first_key + position
    tl.store(p_received, best, mask=in_span)


def attention_received_triton(
    readers: Readers,
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    spans: SpanList,
    num_keys: int,
    rotation: Rotation,
    rule: ScoreRule,
) -> Float[Tensor, " keys"]:
    """See `looseleaf.ops.attention_received`."""
    q, lse = readers.q, readers.lse
    num_kv_heads, page_size = k_pages.shape[1:3]
    head_dim, group = q.shape[2], q.shape[1] // num_kv_heads
    received = torch.zeros(num_kv_heads, num_keys, dtype=torch.float32, device=q.device)
    if not num_keys or not len(q):
        return received.amax(0)
    block_d, block_t = triton.next_power_of_2(head_dim), 0
    if block_d > 256 and 0 < rotation.rotary_dim < head_dim:
        block_d, block_t = latent_blocks(rotation, head_dim)
    block_n = 64 if block_d <= 128 and q.element_size() == 2 else 32
    # rotated rows of wide heads fill the registers, and in fp32 shared memory
    most = 64 if block_d * q.element_size() <= 512 else 16
    block_m = min(most, max(16, triton.next_power_of_2(16 * group)))
    # each span may end in a partial block
    num_spans = len(spans.span_length)
    blocks = num_keys // block_n + num_spans
    _attention_received_kernel[(num_kv_heads, blocks)](
        q, lse, k_pages, received, *table(rotation), rule.alibi_slopes,
        readers.weight, readers.before,
        spans.num_tiles, spans.tile_row_indptr, spans.tile_request, spans.request_span_indptr,
        spans.span_page_indptr, spans.span_offset, spans.span_length, spans.span_mask,
        spans.page_indices, spans.mask_words if spans.mask_words.numel() else None,
        spans.row_positions, num_spans, len(spans.request_span_indptr) - 1,
        *q.stride(), *k_pages.stride(), lse.stride(0), received.stride(0),
        rotation.cos.stride(0), rule.softmax_scale, rule.soft_cap, rule.window,
        GROUP=group, HEAD_DIM=head_dim, ROTARY_DIM=rotation.rotary_dim, PAGE_SIZE=page_size,
        INTERLEAVED=rotation.interleaved, CAPPED=rule.soft_cap != 0, WINDOWED=rule.window != 0,
        WIDENED=k_pages.dtype is FP8, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d,
        BLOCK_T=block_t,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return received.amax(0)

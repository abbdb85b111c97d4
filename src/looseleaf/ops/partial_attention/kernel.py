"""Partial attention on the device: one program an item, KV head and run of row blocks.

Query heads that share a KV head are packed into rows ("packed row" = entry × head of the group), so
that a tile of keys is read once for all of them. A packed row turns into the item's frame once; the
keys never.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.partial_attention.work_list import WorkList
from looseleaf.ops.rotate.kernel import load_rotated, table
from looseleaf.ops.scores.kernel import finish, fold_tile, is_hidden, score_tile, tile_stages
from looseleaf.types import AttnState, Rotation, ScoreRule


@triton.jit
def _partial_attention_kernel(
    q, k_pages, v_pages, out, lse, cos, sin, slopes, slot_positions,
    num_items, item_page_indptr, item_entry_indptr, item_kv_head, item_explicit,
    page_indices, page_positions, entry_row, entry_offset, entry_bound, entry_mask, entry_state,
    mask_words, row_positions,
    stride_q_row, stride_q_head, stride_q_d,
    stride_k_page, stride_k_head, stride_k_slot, stride_k_d,
    stride_v_page, stride_v_head, stride_v_slot, stride_v_d,
    stride_out_state, stride_out_head, stride_lse_state, stride_table, stride_positions,
    softmax_scale, soft_cap, window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, INTERLEAVED: tl.constexpr, CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    if item >= tl.load(num_items):
        return
    kv_head = tl.program_id(1)
    only_head = tl.load(item_kv_head + item)
    if (only_head >= 0) & (only_head != kv_head):
        return
    first_page = tl.load(item_page_indptr + item)
    num_slots = (tl.load(item_page_indptr + item + 1) - first_page) * PAGE_SIZE
    first_entry = tl.load(item_entry_indptr + item)
    num_packed = (tl.load(item_entry_indptr + item + 1) - first_entry) * GROUP
    explicit = tl.load(item_explicit + item)
    o_m, o_n, o_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    m_d = (o_d < HEAD_DIM)[None, :]

    for first in range(tl.program_id(2) * BLOCK_M, num_packed, tl.num_programs(2) * BLOCK_M):
        m_row = first + o_m < num_packed
        entry = first_entry + (first + o_m) // GROUP
        head = kv_head * GROUP + (first + o_m) % GROUP
        row = tl.load(entry_row + entry, mask=m_row, other=0).to(tl.int64)
        bound = tl.load(entry_bound + entry, mask=m_row, other=0)
        offset = tl.load(entry_offset + entry, mask=m_row, other=0)
        frame_position = tl.load(row_positions + row, mask=m_row, other=0) - offset
        last_bound = tl.max(bound, 0)
        slope = None
        if slopes is not None:
            slope = tl.load(slopes + head, mask=m_row, other=0.0)
        # a row before the frame sees nothing in it, and has no angle there
        b_q = load_rotated(
            q + row * stride_q_row + head * stride_q_head, stride_q_d,
            tl.maximum(frame_position, 0), cos, sin, stride_table, m_row,
            HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_D,
        ).to(k_pages.dtype.element_ty)  # fmt: skip  # [M, D]

        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        for start in range(0, num_slots, BLOCK_N):
            in_run = start + o_n < num_slots
            ordinal = first_page + (start + o_n) // PAGE_SIZE
            slot = (start + o_n) % PAGE_SIZE
            page = tl.load(page_indices + ordinal, mask=in_run, other=0).to(tl.int64)
            position = tl.load(page_positions + ordinal, mask=in_run, other=0) + slot
            if slot_positions is not None:
                p_position = slot_positions + page * stride_positions + slot
                m_explicit = in_run & (explicit + tl.zeros_like(slot) != 0)
                b_position = tl.load(p_position, mask=m_explicit, other=-1)
                position = tl.where(m_explicit, b_position, position)
            exists = in_run & (position >= 0)
            visible = exists[None, :] & (position[None, :] < bound[:, None])  # [M, N]
            distance = frame_position[:, None] - position[None, :]
            # a key that no row sees is not read: its page may hold anything
            seen = exists & (position < last_bound)
            if WINDOWED:
                visible &= distance < window
            if mask_words is not None:
                first_word = tl.load(entry_mask + entry, mask=m_row, other=-1)
                visible &= ~is_hidden(mask_words, first_word, position, visible)
            if WINDOWED or mask_words is not None:
                seen = tl.max(visible.to(tl.int32), 0) > 0

            p_k = k_pages + page * stride_k_page + kv_head * stride_k_head + slot * stride_k_slot
            p_v = v_pages + page * stride_v_page + kv_head * stride_v_head + slot * stride_v_slot
            m_kv = seen[:, None] & m_d
            b_k = tl.load(
                p_k[:, None] + (o_d * stride_k_d)[None, :], mask=m_kv, other=0.0
            )  # [N, D]
            b_v = tl.load(
                p_v[:, None] + (o_d * stride_v_d)[None, :], mask=m_kv, other=0.0
            )  # [N, D]
            scores = score_tile(b_q, b_k, distance, visible, softmax_scale, soft_cap, slope, CAPPED)
            acc, peak, total = fold_tile(scores, b_v, acc, peak, total)

        b_out, b_lse = finish(acc, peak, total)
        state = tl.load(entry_state + entry, mask=m_row, other=0).to(tl.int64)
        p_out = out + state * stride_out_state + head * stride_out_head
        tl.store(p_out[:, None] + o_d[None, :], b_out, mask=m_row[:, None] & m_d)
        tl.store(lse + state * stride_lse_state + head, b_lse, mask=m_row)


def partial_attention_triton(
    q: Float[Tensor, "rows qo_heads head_dim"],
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    v_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    work: WorkList,
    rotation: Rotation,
    rule: ScoreRule,
    slot_positions: Int[Tensor, "pages page_size"] | None = None,
) -> AttnState:
    """See `looseleaf.ops.partial_attention`."""
    _, num_qo_heads, head_dim = q.shape
    num_kv_heads, page_size = k_pages.shape[1:3]
    out = torch.empty((work.state_capacity, *q.shape[1:]), dtype=torch.float32, device=q.device)
    lse = torch.full(out.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    items, group = work.item_kv_head.shape[0], num_qo_heads // num_kv_heads
    if not items or not out.numel():
        return AttnState(out, lse)
    assert slot_positions is None or slot_positions.stride(1) == 1, "slots must be contiguous"
    block_d = triton.next_power_of_2(head_dim)
    block_m, block_n = tile_shape(
        work.state_capacity * group / items, block_d, k_pages.element_size()
    )
    # how many rows an item has is on the device only: blocks past the grid are looped over
    row_programs = min(4, triton.cdiv(work.state_capacity * group, block_m))
    _partial_attention_kernel[(items, num_kv_heads, row_programs)](
        q, k_pages, v_pages, out, lse, *table(rotation), rule.alibi_slopes, slot_positions,
        work.num_items, work.item_page_indptr, work.item_entry_indptr, work.item_kv_head,
        work.item_explicit, work.page_indices, work.page_positions, work.entry_row,
        work.entry_offset, work.entry_bound, work.entry_mask, work.entry_state,
        work.mask_words if work.mask_words.numel() else None, work.row_positions,
        *q.stride(), *k_pages.stride(), *v_pages.stride(), *out.stride()[:2], lse.stride(0),
        rotation.cos.stride(0), slot_positions.stride(0) if slot_positions is not None else 0,
        rule.softmax_scale, rule.soft_cap, rule.window,
        GROUP=group, HEAD_DIM=head_dim, ROTARY_DIM=rotation.rotary_dim, PAGE_SIZE=page_size,
        INTERLEAVED=rotation.interleaved, CAPPED=rule.soft_cap != 0, WINDOWED=rule.window != 0,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d,
        num_warps=4, num_stages=tile_stages(block_n, block_d, k_pages.element_size()),
        enable_fp_fusion=True,
    )  # fmt: skip
    return AttnState(out, lse)


def tile_shape(packed_rows: float, block_d: int, itemsize: int) -> tuple[int, int]:
    """``BLOCK_M`` for the mean number of packed rows an item has room for, and ``BLOCK_N``."""
    most = (64 if itemsize < 4 else 32) // (1 if block_d <= 128 else 2)
    return max(16, min(most, triton.next_power_of_2(round(packed_rows)))), most

"""Merge of rows and attention over their private items: one program per row and KV head.

The query heads of a KV head are the rows of one tile over the private keys. Then each head merges
its states, all of them together. A program that starts early reads its keys while the previous
kernel still computes the states."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.hopper import attention as hopper_attention
from looseleaf.ops.partial_attention.work_list import WorkList
from looseleaf.ops.rotate.kernel import load_rotated, table
from looseleaf.ops.scores.kernel import (
    LN_2,
    LOG2_E,
    await_previous,
    chains,
    fold_tile,
    scaled_query,
    score_tile,
    slots_of_tile,
    start_next,
)
from looseleaf.types import AttnState, Rotation, ScoreRule

_BLOCK_S = 8
# registers per thread for four programs per SM: 64 rows of 8 KV heads run in one wave
_REGISTERS = 128


@triton.jit
def _with_states(b_out, b_lse, acc, peak, total):
    """The running state of heads [G, D] after the merge of states [G, S, D].

    Warps are split along the first dim, so heads come first: one thread sums all states of an
    element."""
    b_lse = b_lse * LOG2_E
    new_peak = tl.maximum(peak, tl.max(b_lse, 1))
    pivot = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weight, shrink = tl.exp2(b_lse - pivot[:, None]), tl.exp2(peak - pivot)
    # the output of an empty state is undefined
    b_out = tl.where((b_lse > float("-inf"))[:, :, None], b_out, 0.0)
    acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * b_out, 1)
    return acc, new_peak, total * shrink + tl.sum(weight, 1)


@triton.jit
def _finish_rows_kernel(
    q, k_pages, v_pages, states_out, states_lse, out, lse, cos, sin,
    row_own, row_state_indptr, page_indices, page_positions, row_positions,
    stride_q_row, stride_q_head, stride_q_d, stride_page, stride_page_head, stride_slot, stride_d,
    stride_state, stride_state_head, stride_lse_state, stride_out_row, stride_out_head,
    stride_table, softmax_scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, INTERLEAVED: tl.constexpr, CHAINED: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    start_next(CHAINED)
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, stop = tl.load(row_state_indptr + row), tl.load(row_state_indptr + row + 1)
    first_page, num_slots = tl.load(row_own + 4 * row), tl.load(row_own + 4 * row + 1)
    offset, bound = tl.load(row_own + 4 * row + 2), tl.load(row_own + 4 * row + 3)
    o_n, o_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    o_g, o_s = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_S)
    m_d, m_head = (o_d < HEAD_DIM)[None, :], o_g < GROUP
    frame_position = tl.load(row_positions + row) - offset + tl.zeros_like(o_g)
    head = kv_head * GROUP + o_g
    p_lse = states_lse + head[:, None]
    p_states = states_out + (head * stride_state_head)[:, None, None] + o_d[None, None, :]
    # EARLY: the previous kernel has waited for queries and keys, so only the states are pending
    if not EARLY:
        await_previous(CHAINED)
    b_q = load_rotated(
        q + row * stride_q_row + head * stride_q_head, stride_q_d,
        tl.maximum(frame_position, 0), cos, sin, stride_table, m_head,
        HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_D,
    )  # fmt: skip  # [G, D]
    b_q = scaled_query(b_q, softmax_scale, 0.0, False).to(q.dtype.element_ty)
    # repeated to fill the smallest tile, which costs less than masked loads
    PARTS: tl.constexpr = BLOCK_M // BLOCK_G
    b_q = tl.reshape(
        tl.broadcast_to(b_q[None, :, :], (PARTS, BLOCK_G, BLOCK_D)), (BLOCK_M, BLOCK_D)
    )
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    k_head, v_head = k_pages + kv_head * stride_page_head, v_pages + kv_head * stride_page_head
    for tile in range(0, num_slots, BLOCK_N):
        in_run = tile + o_n < num_slots
        ordinal, slot = slots_of_tile(tile, o_n, PAGE_SIZE, BLOCK_N)
        page = tl.load(page_indices + first_page + ordinal, mask=in_run, other=0).to(tl.int64)
        position = tl.load(page_positions + first_page + ordinal, mask=in_run, other=0) + slot
        # keys that the row does not see are not loaded: their page is undefined
        seen = in_run & (position < bound)
        o_kv = (page * stride_page + slot * stride_slot)[:, None] + (o_d * stride_d)[None, :]
        b_k = tl.load(k_head + o_kv, mask=seen[:, None] & m_d, other=0.0)  # [N, D]
        b_v = tl.load(v_head + o_kv, mask=seen[:, None] & m_d, other=0.0)  # [N, D]
        scores = score_tile(b_q, b_k, None, 0.0, None, False)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        acc, peak, total = fold_tile(scores, b_v.to(b_q.dtype), acc, peak, total, True)

    # the first copy of the heads
    m_first = tl.arange(0, PARTS) == 0
    acc = tl.reshape(acc, (PARTS, BLOCK_G, BLOCK_D))
    acc = tl.sum(tl.where(m_first[:, None, None], acc, 0.0), 0)  # [G, D]
    peak = tl.reshape(peak, (PARTS, BLOCK_G))
    peak = tl.max(tl.where(m_first[:, None], peak, float("-inf")), 0)
    total = tl.reshape(total, (PARTS, BLOCK_G))
    total = tl.sum(tl.where(m_first[:, None], total, 0.0), 0)

    await_previous(CHAINED)
    for first in range(start, stop, BLOCK_S):
        state = (first + o_s).to(tl.int64)
        m_state = m_head[:, None] & (state < stop)[None, :]
        p_state_lse = p_lse + (state * stride_lse_state)[None, :]
        b_lse = tl.load(p_state_lse, mask=m_state, other=float("-inf"))
        m_out = m_state[:, :, None] & m_d[None, :, :]
        b_out = tl.load(p_states + (state * stride_state)[None, :, None], mask=m_out, other=0.0)
        acc, peak, total = _with_states(b_out, b_lse, acc, peak, total)

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    p_out = out + row * stride_out_row + head * stride_out_head
    tl.store(p_out[:, None] + o_d[None, :], acc / total[:, None], mask=m_head[:, None] & m_d)
    b_lse = tl.where(empty, float("-inf"), (peak + tl.log2(total)) * LN_2)
    tl.store(lse + row * (tl.num_programs(1) * GROUP) + head, b_lse, mask=m_head)


def finish_rows_triton(
    states: AttnState,
    q: Float[Tensor, "rows qo_heads head_dim"],
    pages: tuple[Tensor, Tensor],
    work: WorkList,
    rotation: Rotation,
    rule: ScoreRule,
    out: Float[Tensor, "rows qo_heads head_dim"],
) -> AttnState:
    """See `looseleaf.ops.finish_rows`."""
    k_pages, v_pages = pages
    rows, heads, head_dim = q.shape
    num_kv_heads, page_size = k_pages.shape[1:3]
    group, block_d = heads // num_kv_heads, triton.next_power_of_2(head_dim)
    lse = torch.empty((rows, heads), dtype=torch.float32, device=q.device)
    if not out.numel():
        return AttnState(out, lse)
    assert work.row_own is not None
    assert states.out.stride(2) == out.stride(2) == 1, "a head's output must be contiguous"
    assert states.lse.stride(1) == 1, "the heads of a state must be contiguous"
    assert k_pages.stride() == v_pages.stride(), "K and V pages must be laid out alike"
    early = states.lse.numel() > 0 and _awaits_inputs(work, k_pages, rule)
    block_g, chained = triton.next_power_of_2(group), chains(q)
    _finish_rows_kernel[(rows, num_kv_heads)](
        q, k_pages, v_pages, *states, out, lse, *table(rotation),
        work.row_own, work.row_state_indptr, work.page_indices, work.page_positions,
        work.row_positions, *q.stride(), *k_pages.stride(), *states.out.stride()[:2],
        states.lse.stride(0), *out.stride()[:2], rotation.cos.stride(0), rule.softmax_scale,
        GROUP=group, HEAD_DIM=head_dim, ROTARY_DIM=rotation.rotary_dim, PAGE_SIZE=page_size,
        INTERLEAVED=rotation.interleaved, CHAINED=chained, EARLY=early,
        BLOCK_M=max(16, block_g), BLOCK_G=block_g, BLOCK_N=32, BLOCK_S=_BLOCK_S, BLOCK_D=block_d,
        num_warps=4, num_stages=2, maxnreg=_REGISTERS, enable_fp_fusion=True, launch_pdl=chained,
    )  # fmt: skip
    return AttnState(out, lse)


def _awaits_inputs(work: WorkList, k_pages: Tensor, rule: ScoreRule) -> bool:
    """Whether the Hopper kernel computes the states.

    It starts the next kernel only after its own wait for the kernels that wrote queries and pages.
    """
    tiles = [tile for tile in work.tiles if not tile.finishing]
    planned = bool(tiles) and not any(tile.chosen for tile in tiles)
    return planned and hopper_attention.serves(k_pages, rule)

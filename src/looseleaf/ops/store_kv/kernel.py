"""Rotation of keys and the write to pages: one program per token and some heads."""

import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.page_dtypes import FP8, same_memory
from looseleaf.ops.rotate.kernel import heads_per_program, load_rotated, table
from looseleaf.ops.scores.kernel import await_previous, chains, start_next
from looseleaf.types import Rotation


@triton.jit
def store_heads(
    k, v, positions, slots, cos, sin, k_pages, v_pages, token, head, m_head,
    stride_k_token, stride_k_head, stride_k_d, stride_v_token, stride_v_head, stride_v_d,
    stride_k_page, stride_k_page_head, stride_k_slot, stride_k_page_d,
    stride_v_page, stride_v_page_head, stride_v_slot, stride_v_page_d, stride_table,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, CHAINED: tl.constexpr, SATURATE: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_VALUES: tl.constexpr = True,
):  # fmt: skip
    """Stores heads [H] of one token if it has a slot; waits for the previous kernels."""
    flat = tl.load(slots + token).to(tl.int64)
    page, slot = flat // PAGE_SIZE, flat % PAGE_SIZE
    o_d = tl.arange(0, BLOCK_D)
    m_head &= flat + tl.zeros_like(head) >= 0
    m_x = m_head[:, None] & (o_d < HEAD_DIM)[None, :]
    position = tl.load(positions + token) + tl.zeros_like(head)
    await_previous(CHAINED)
    b_k = load_rotated(
        k + token * stride_k_token + head * stride_k_head, stride_k_d, position,
        cos, sin, stride_table, m_head, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_D,
    )  # fmt: skip
    if SATURATE:
        # saturates to the largest e4m3 number
        b_k = tl.minimum(tl.maximum(b_k, -448.0), 448.0)
    p_k = k_pages + page * stride_k_page + slot * stride_k_slot + head * stride_k_page_head
    tl.store(p_k[:, None] + (o_d * stride_k_page_d)[None, :], b_k, mask=m_x)

    if HAS_VALUES:
        p_v = v + token * stride_v_token + head * stride_v_head
        b_v = tl.load(p_v[:, None] + (o_d * stride_v_d)[None, :], mask=m_x)
        if SATURATE:
            b_v = tl.minimum(tl.maximum(b_v.to(tl.float32), -448.0), 448.0)
        p_v = v_pages + page * stride_v_page + slot * stride_v_slot + head * stride_v_page_head
        tl.store(p_v[:, None] + (o_d * stride_v_page_d)[None, :], b_v, mask=m_x)


# slices of one buffer, so the pointers' alignment varies
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _store_kv_kernel(
    k, v, positions, slots, cos, sin, k_pages, v_pages, num_heads,
    stride_k_token, stride_k_head, stride_k_d, stride_v_token, stride_v_head, stride_v_d,
    stride_k_page, stride_k_page_head, stride_k_slot, stride_k_page_d,
    stride_v_page, stride_v_page_head, stride_v_slot, stride_v_page_d, stride_table,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, CHAINED: tl.constexpr, SATURATE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, HAS_VALUES: tl.constexpr,
):  # fmt: skip
    start_next(CHAINED)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    store_heads(
        k, v, positions, slots, cos, sin, k_pages, v_pages,
        tl.program_id(0).to(tl.int64), head, head < num_heads,
        stride_k_token, stride_k_head, stride_k_d, stride_v_token, stride_v_head, stride_v_d,
        stride_k_page, stride_k_page_head, stride_k_slot, stride_k_page_d,
        stride_v_page, stride_v_page_head, stride_v_slot, stride_v_page_d, stride_table,
        PAGE_SIZE, HEAD_DIM, ROTARY_DIM, INTERLEAVED, CHAINED, SATURATE, BLOCK_D,
        HAS_VALUES,
    )  # fmt: skip


def store_kv_triton(
    k: Float[Tensor, "tokens kv_heads head_dim"],
    v: Float[Tensor, "tokens kv_heads head_dim"],
    frame_positions: Int[Tensor, " tokens"],
    slots: Int[Tensor, " tokens"],
    rotation: Rotation,
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    v_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
) -> None:
    """See `looseleaf.ops.store_kv`."""
    if not k.numel():
        return
    tokens, heads, head_dim = k.shape
    block_d = triton.next_power_of_2(head_dim)
    block_h = heads_per_program(heads, block_d)
    # a chained kernel reads these before its wait, so the previous launch may not copy them
    chained = chains(k) and frame_positions.is_contiguous() and slots.is_contiguous()
    _store_kv_kernel[(tokens, triton.cdiv(heads, block_h))](
        k, v, frame_positions.contiguous(), slots.contiguous(), *table(rotation), k_pages, v_pages,
        heads, *k.stride(), *v.stride(), *k_pages.stride(), *v_pages.stride(),
        rotation.cos.stride(0), PAGE_SIZE=k_pages.shape[2], HEAD_DIM=head_dim,
        ROTARY_DIM=rotation.rotary_dim, INTERLEAVED=rotation.interleaved,
        CHAINED=chained, SATURATE=k_pages.dtype is FP8, BLOCK_H=block_h, BLOCK_D=block_d,
        HAS_VALUES=not same_memory(k_pages, v_pages),
        enable_fp_fusion=True,
        launch_pdl=chained,
    )  # fmt: skip

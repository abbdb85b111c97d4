"""Gather and rotate on the device: one program some keys and a KV head."""

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.gather_kv import KeySources
from looseleaf.ops.page_dtypes import FP8
from looseleaf.ops.rotate.kernel import load_rotated, table
from looseleaf.types import Rotation

_BLOCK_KEYS = 32


# lists of any length begin anywhere
@triton.jit(do_not_specialize=["num_keys"], do_not_specialize_on_alignment=["slots", "turns"])
def _gather_kv_kernel(
    k_pages, v_pages, slots, turns, cos, sin, k_out, v_out, num_keys,
    stride_k_page, stride_k_head, stride_k_slot, stride_k_d,
    stride_v_page, stride_v_head, stride_v_slot, stride_v_d,
    stride_ko_page, stride_ko_head, stride_ko_slot, stride_ko_d,
    stride_vo_page, stride_vo_head, stride_vo_slot, stride_vo_d, stride_table,
    PAGE_SIZE: tl.constexpr, GATHERED_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, SATURATE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    key = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_key = key < num_keys
    flat = tl.load(slots + key, mask=m_key, other=-2).to(tl.int64)
    turn = tl.load(turns + key, mask=m_key, other=0)
    # -1 becomes zeros, -2 is left alone
    m_there = flat >= 0
    page, slot = flat // PAGE_SIZE, flat % PAGE_SIZE
    to, at = key // GATHERED_SIZE, key % GATHERED_SIZE
    o_d = tl.arange(0, BLOCK_D)
    m_x = m_there[:, None] & (o_d < HEAD_DIM)[None, :]
    m_out = (flat >= -1)[:, None] & (o_d < HEAD_DIM)[None, :]
    p_v = v_pages + page * stride_v_page + slot * stride_v_slot + head * stride_v_head
    b_v = tl.load(p_v[:, None] + (o_d * stride_v_d)[None, :], mask=m_x, other=0.0)
    b_k = load_rotated(
        k_pages + page * stride_k_page + slot * stride_k_slot + head * stride_k_head, stride_k_d,
        turn, cos, sin, stride_table, m_there, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_D,
    )  # fmt: skip
    if SATURATE:
        # e4m3: the largest number that a page holds
        b_k = tl.minimum(tl.maximum(b_k, -448.0), 448.0)
    p_ko = k_out + to * stride_ko_page + at * stride_ko_slot + head * stride_ko_head
    tl.store(p_ko[:, None] + (o_d * stride_ko_d)[None, :], b_k, mask=m_out)
    p_vo = v_out + to * stride_vo_page + at * stride_vo_slot + head * stride_vo_head
    tl.store(p_vo[:, None] + (o_d * stride_vo_d)[None, :], b_v, mask=m_out)


def gather_kv_triton(
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    v_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    sources: KeySources,
    rotation: Rotation,
    k_gathered: Float[Tensor, "gathered kv_heads gathered_size head_dim"],
    v_gathered: Float[Tensor, "gathered kv_heads gathered_size head_dim"],
) -> None:
    """See `looseleaf.ops.gather_kv`."""
    num_keys = len(sources.slots)
    if not num_keys:
        return
    heads, page_size, head_dim = k_pages.shape[1:]
    _gather_kv_kernel[(triton.cdiv(num_keys, _BLOCK_KEYS), heads)](
        k_pages, v_pages, sources.slots, sources.turns, *table(rotation), k_gathered, v_gathered,
        num_keys, *k_pages.stride(), *v_pages.stride(), *k_gathered.stride(), *v_gathered.stride(),
        rotation.cos.stride(0), PAGE_SIZE=page_size, GATHERED_SIZE=k_gathered.shape[2],
        HEAD_DIM=head_dim, ROTARY_DIM=rotation.rotary_dim, INTERLEAVED=rotation.interleaved,
        SATURATE=k_gathered.dtype is FP8, BLOCK_N=_BLOCK_KEYS,
        BLOCK_D=triton.next_power_of_2(head_dim), enable_fp_fusion=True,
    )  # fmt: skip

"""Gather and rotate on the device: one program per few keys and heads, which share cosines and
sines."""

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.gather_kv import KeySources
from looseleaf.ops.page_dtypes import FP8, same_memory
from looseleaf.ops.rotate.kernel import load_rotated, table
from looseleaf.types import Rotation

# keys and heads per program: more cost registers, fewer leave too few loads in flight
_BLOCK_KEYS, _MAX_HEADS = 8, 8


@triton.jit
def _store(p_out, x, m_out, SATURATE: tl.constexpr):
    if SATURATE:
        # saturates to the largest e4m3 number
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    tl.store(p_out, x, mask=m_out)


@triton.jit
def _address(pages, number, head, page_stride, head_stride, slot_stride, PAGE_SIZE: tl.constexpr):
    """Address of the vectors of slots and heads; ``number`` is a flat slot."""
    page, slot = number // PAGE_SIZE, number % PAGE_SIZE
    return pages + page * page_stride + slot * slot_stride + head * head_stride


@triton.jit
def _rotate_halves(
    p_k, p_out, stride_d, stride_out_d, offset, cos, sin, stride_table, m_key, m_k, m_out,
    HALF: tl.constexpr, SATURATE: tl.constexpr,
):  # fmt: skip
    """Rotates keys [keys, heads, 1] with ``rotary_dim == head_dim`` by halves: each number is
    loaded once."""
    o_d = tl.arange(0, HALF)[None, None, :]
    p_angle = (offset.to(tl.int64) * stride_table)[:, None] + tl.arange(0, HALF)[None, :]
    b_low = tl.load(p_k + o_d * stride_d, mask=m_k, other=0.0).to(tl.float32)
    b_high = tl.load(p_k + (o_d + HALF) * stride_d, mask=m_k, other=0.0).to(tl.float32)
    b_cos = tl.load(cos + p_angle, mask=m_key[:, None], other=1.0)[:, None, :]
    b_sin = tl.load(sin + p_angle, mask=m_key[:, None], other=0.0)[:, None, :]
    p_out += o_d * stride_out_d
    _store(p_out, b_low * b_cos - b_high * b_sin, m_out, SATURATE)
    _store(p_out + HALF * stride_out_d, b_high * b_cos + b_low * b_sin, m_out, SATURATE)


# slices of one buffer, so the pointers' alignment varies
@triton.jit(do_not_specialize=["num_keys"], do_not_specialize_on_alignment=["slots", "turns"])
def _gather_kv_kernel(
    k_pages, v_pages, slots, turns, cos, sin, k_out, v_out, num_keys, num_heads,
    stride_k_page, stride_k_head, stride_k_slot, stride_k_d,
    stride_v_page, stride_v_head, stride_v_slot, stride_v_d,
    stride_ko_page, stride_ko_head, stride_ko_slot, stride_ko_d,
    stride_vo_page, stride_vo_head, stride_vo_slot, stride_vo_d, stride_table,
    PAGE_SIZE: tl.constexpr, GATHERED_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, IN_HALVES: tl.constexpr,
    SATURATE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_VALUES: tl.constexpr,
):  # fmt: skip
    first_key = tl.program_id(0).to(tl.int64) * BLOCK_N
    first_head = tl.program_id(1).to(tl.int64) * BLOCK_H
    key, head = first_key + tl.arange(0, BLOCK_N), first_head + tl.arange(0, BLOCK_H)
    # -1 writes zeros, -2 writes nothing; the offset of both is arbitrary
    source = tl.load(slots + key, mask=key < num_keys, other=-2).to(tl.int64)
    flat = source[:, None, None]
    heads, o_d = head[None, :, None], tl.arange(0, BLOCK_D)
    m_there, m_out = (flat >= 0) & (heads < num_heads), (flat >= -1) & (heads < num_heads)
    m_d, target = (o_d < HEAD_DIM)[None, None, :], key[:, None, None]
    if HAS_VALUES:
        p_v = _address(v_pages, flat, heads, stride_v_page, stride_v_head, stride_v_slot, PAGE_SIZE)
        b_v = tl.load(p_v + (o_d * stride_v_d)[None, None, :], mask=m_there & m_d, other=0.0)
    if IN_HALVES:
        offset = tl.load(turns + key, mask=key < num_keys, other=0)
        _rotate_halves(
            _address(k_pages, flat, heads, stride_k_page, stride_k_head, stride_k_slot, PAGE_SIZE),
            _address(
                k_out, target, heads, stride_ko_page, stride_ko_head, stride_ko_slot, GATHERED_SIZE
            ),
            stride_k_d, stride_ko_d, offset, cos, sin, stride_table, source >= 0, m_there, m_out,
            HEAD_DIM // 2, SATURATE,
        )  # fmt: skip
    else:
        row = tl.arange(0, BLOCK_N * BLOCK_H)
        key, head = first_key + row // BLOCK_H, first_head + row % BLOCK_H
        flat = tl.load(slots + key, mask=key < num_keys, other=-2).to(tl.int64)
        offset = tl.load(turns + key, mask=key < num_keys, other=0)
        b_k = load_rotated(
            _address(k_pages, flat, head, stride_k_page, stride_k_head, stride_k_slot, PAGE_SIZE),
            stride_k_d, offset, cos, sin, stride_table, (flat >= 0) & (head < num_heads),
            HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_D,
        )  # fmt: skip
        p_ko = _address(
            k_out, key, head, stride_ko_page, stride_ko_head, stride_ko_slot, GATHERED_SIZE
        )
        m_ko = ((flat >= -1) & (head < num_heads))[:, None] & (o_d < HEAD_DIM)[None, :]
        _store(p_ko[:, None] + (o_d * stride_ko_d)[None, :], b_k, m_ko, SATURATE)
    if HAS_VALUES:
        p_vo = _address(
            v_out, target, heads, stride_vo_page, stride_vo_head, stride_vo_slot, GATHERED_SIZE
        )
        tl.store(p_vo + (o_d * stride_vo_d)[None, None, :], b_v, mask=m_out & m_d)


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
    block_h = min(_MAX_HEADS, triton.next_power_of_2(heads))
    in_halves = rotation.rotary_dim == head_dim == triton.next_power_of_2(head_dim)
    in_halves = in_halves and not rotation.interleaved
    _gather_kv_kernel[(triton.cdiv(num_keys, _BLOCK_KEYS), triton.cdiv(heads, block_h))](
        k_pages, v_pages, sources.slots, sources.turns, *table(rotation), k_gathered, v_gathered,
        num_keys, heads, *k_pages.stride(), *v_pages.stride(), *k_gathered.stride(),
        *v_gathered.stride(), rotation.cos.stride(0), PAGE_SIZE=page_size,
        GATHERED_SIZE=k_gathered.shape[2], HEAD_DIM=head_dim, ROTARY_DIM=rotation.rotary_dim,
        INTERLEAVED=rotation.interleaved, IN_HALVES=in_halves,
        SATURATE=k_gathered.dtype is FP8, BLOCK_N=_BLOCK_KEYS, BLOCK_H=block_h,
        BLOCK_D=triton.next_power_of_2(head_dim),
        HAS_VALUES=not same_memory(k_gathered, v_gathered), enable_fp_fusion=True,
    )  # fmt: skip

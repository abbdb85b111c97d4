"""RoPE on the device: each dim loads its partner too, so both pairings share one code path."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.types import Rotation


@triton.jit
def load_rotated(
    vector,
    stride_d,
    position,
    cos,
    sin,
    stride_table,
    m_row,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The vectors at ``vector`` [M], rotated to ``position`` [M]: fp32 [M, BLOCK_D]."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    o_d = tl.arange(0, BLOCK_D)
    if INTERLEAVED:
        is_first = o_d % 2 == 0
        partner = o_d ^ 1
        angle = o_d // 2
    else:
        is_first = o_d < HALF
        partner = tl.where(is_first, o_d + HALF, o_d - HALF)
        angle = tl.where(is_first, o_d, o_d - HALF)
    m_x = m_row[:, None] & (o_d < HEAD_DIM)[None, :]
    m_turn = m_row[:, None] & (o_d < ROTARY_DIM)[None, :]
    p_angle = position.to(tl.int64)[:, None] * stride_table + angle[None, :]
    b_x = tl.load(vector[:, None] + (o_d * stride_d)[None, :], mask=m_x, other=0.0)
    b_partner = tl.load(vector[:, None] + (partner * stride_d)[None, :], mask=m_turn, other=0.0)
    b_cos = tl.load(cos + p_angle, mask=m_turn, other=1.0)
    b_sin = tl.load(sin + p_angle, mask=m_turn, other=0.0)
    b_sin = tl.where(is_first[None, :], -b_sin, b_sin)
    return b_x.to(tl.float32) * b_cos + b_partner.to(tl.float32) * b_sin


@triton.jit
def load_unrotated(vector, stride_d, m_row, DIMS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The first ``DIMS`` of the vectors at ``vector`` [M]: fp32 [M, BLOCK_D]."""
    o_d = tl.arange(0, BLOCK_D)
    m_x = m_row[:, None] & (o_d < DIMS)[None, :]
    return tl.load(vector[:, None] + (o_d * stride_d)[None, :], mask=m_x, other=0.0).to(tl.float32)


# slices of one buffer, so the pointer's alignment varies
@triton.jit(do_not_specialize_on_alignment=["positions"])
def _rotate_kernel(
    x,
    positions,
    cos,
    sin,
    out,
    num_heads,
    stride_x_token,
    stride_x_head,
    stride_x_d,
    stride_table,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_head = head < num_heads
    position = tl.load(positions + token) + tl.zeros_like(head)
    vector = x + token * stride_x_token + head.to(tl.int64) * stride_x_head
    b_out = load_rotated(
        vector, stride_x_d, position, cos, sin, stride_table, m_head,
        HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_D,
    )  # fmt: skip
    o_d = tl.arange(0, BLOCK_D)
    p_out = out + (token * num_heads + head)[:, None] * HEAD_DIM + o_d[None, :]
    tl.store(p_out, b_out, mask=m_head[:, None] & (o_d < HEAD_DIM)[None, :])


def rotate_triton(
    x: Float[Tensor, "tokens heads head_dim"],
    positions: Int[Tensor, " tokens"],
    rotation: Rotation,
) -> Float[Tensor, "tokens heads head_dim"]:
    """See `looseleaf.ops.rotate`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    tokens, heads, head_dim = x.shape
    block_d = triton.next_power_of_2(head_dim)
    block_h = heads_per_program(heads, block_d)
    _rotate_kernel[(tokens, triton.cdiv(heads, block_h))](
        x, positions.contiguous(), *table(rotation), out, heads, *x.stride(),
        rotation.cos.stride(0), HEAD_DIM=head_dim, ROTARY_DIM=rotation.rotary_dim,
        INTERLEAVED=rotation.interleaved, BLOCK_H=block_h, BLOCK_D=block_d,
        enable_fp_fusion=True,
    )  # fmt: skip
    return out


def heads_per_program(heads: int, block_d: int) -> int:
    """Heads per program of an elementwise kernel: at most 4,096 numbers."""
    return max(1, min(triton.next_power_of_2(heads), 4096 // block_d))


def table(rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Cosines and sines of ``rotation``; kernels use one stride for both."""
    cos, sin = rotation.cos, rotation.sin
    assert cos.stride() == sin.stride(), "cos and sin must be laid out alike"
    assert cos.shape[1] < 2 or cos.stride(1) == 1, "a position's angles must be contiguous"
    return cos, sin

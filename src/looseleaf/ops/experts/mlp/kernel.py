"""Grouped products on the device: a program per tile of rows of an expert and block of outputs.

Matrices are the first operand, and their tile has a row of gate and of up for each output. Tiles of
rows grow with the rows per expert, from 16 for a decode step to 128 for a prompt."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from looseleaf.errors import InvalidOption
from looseleaf.ops.dense.scaled_linear import TILE, ScaledMatrix
from looseleaf.ops.dense.scaled_linear.kernel import add_tile, unshifted
from looseleaf.ops.experts.group import RowGroups
from looseleaf.ops.experts.group.kernel import group_rows_triton
from looseleaf.ops.experts.mlp import FEW_ROWS, Stacked, shape_of, tile_rows
from looseleaf.ops.experts.mlp.activation import Activation, ClampedSwiglu
from looseleaf.ops.experts.mlp.mxfp4 import Mxfp4Matrix
from looseleaf.ops.experts.route import Routes
from looseleaf.ops.scores.kernel import await_previous, chains, start_next, tanh

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_GELU_SCALE, _GELU_CUBE = tl.constexpr(0.7978845608028654), tl.constexpr(0.044715)


class Blocks(NamedTuple):
    """Sizes of a program: rows, features of the matrix, inner dims; warps and stages."""

    m: int
    n: int
    k: int
    warps: int
    stages: int

    def options(self) -> dict[str, int | bool]:
        """The options of a launch."""
        sizes = {"BLOCK_M": self.m, "BLOCK_N": self.n, "BLOCK_K": self.k}
        rest = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}
        return {**sizes, **rest}


@triton.jit
def activated(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    """The activation of ``gate`` times ``up``."""
    if ACTIVATION == "swigluoai":
        # NaN stays NaN
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL) + 1.0
        decay = tl.exp(-tl.abs(alpha * gate))
        value = gate * tl.where(gate < 0, decay, 1.0) / (1.0 + decay)
    elif ACTIVATION == "silu":
        # exp of a number <= 0 cannot overflow
        decay = tl.exp(-tl.abs(gate))
        value = gate * tl.where(gate < 0, decay, 1.0) / (1.0 + decay)
    elif ACTIVATION == "gelu":
        value = 0.5 * gate * (1.0 + tl.erf(gate * _SQRT_HALF))
    else:
        tl.static_assert(ACTIVATION == "gelu_new")
        inner = _GELU_SCALE * (gate + _GELU_CUBE * gate * gate * gate)
        value = 0.5 * gate * (1.0 + tanh(inner))
    return value * up


@triton.jit
def _product(
    p_weight, p_x, m_n, m_m, inner,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The product [N, M] of a matrix's rows [N, 1] and rows [1, M] over ``inner`` dims."""
    o_k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, inner, BLOCK_K):
        if EVEN:
            b_weight = tl.load(p_weight + (start + o_k)[None, :])  # [N, K]
            b_x = tl.load(p_x + (start + o_k)[:, None], mask=m_m, other=0.0)  # [K, M]
        else:
            m_k = start + o_k < inner
            b_weight = tl.load(
                p_weight + (start + o_k)[None, :], mask=m_n & m_k[None, :], other=0.0
            )
            b_x = tl.load(p_x + (start + o_k)[:, None], mask=m_m & m_k[:, None], other=0.0)
        acc = tl.dot(b_weight, b_x, acc, input_precision="ieee")
    return acc


@triton.jit
def _mxfp4_product(
    codes, scales, row, p_x, m_n, m_m, inner,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The product of a matrix's rows in MXFP4: bytes of two codes, and a scale for 32 dims."""
    X_FORMAT: tl.constexpr = "bf16" if p_x.dtype.element_ty == tl.bfloat16 else "fp16"
    o_k, o_byte = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // 2)
    o_block = tl.arange(0, BLOCK_K // 32)
    p_codes, p_scales = codes + row[:, None] * (inner // 2), scales + row[:, None] * (inner // 32)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, inner, BLOCK_K):
        byte, block = start // 2 + o_byte, start // 32 + o_block
        if EVEN:
            b_codes = tl.load(p_codes + byte[None, :])  # [N, K / 2]
            b_scales = tl.load(p_scales + block[None, :])  # [N, K / 32]
            b_x = tl.load(p_x + (start + o_k)[:, None], mask=m_m, other=0.0)  # [K, M]
        else:
            m_byte, m_block = m_n & (2 * byte < inner)[None, :], m_n & (32 * block < inner)[None, :]
            b_codes = tl.load(p_codes + byte[None, :], mask=m_byte, other=0)
            b_scales = tl.load(p_scales + block[None, :], mask=m_block, other=127)
            m_x = m_m & (start + o_k < inner)[:, None]
            b_x = tl.load(p_x + (start + o_k)[:, None], mask=m_x, other=0.0)
        acc = tl.dot_scaled(b_codes, b_scales, "e2m1", b_x, None, X_FORMAT, acc, fast_math=True)
    return acc


@triton.jit
def _coded_product(
    codes, scales, zeros, row, p_x, m_m, inner, stride_n, stride_g,
    KIND: tl.constexpr, GROUP_TILES: tl.constexpr, WORDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The product of a matrix's rows, which are codes; a tile has one scale for each row."""
    HALF: tl.constexpr = BLOCK_K // 2
    WIDTH: tl.constexpr = HALF if KIND == "int4" else BLOCK_K
    HAS_ZEROS: tl.constexpr = zeros is not None
    o_k = tl.arange(0, WIDTH)
    p_codes = codes + row[:, None] * (inner // BLOCK_K * WIDTH) + o_k[None, :]
    p_x += o_k[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    b_zeros = tl.zeros((BLOCK_N,), tl.float32)
    for tile in range(0, inner // BLOCK_K):
        place = row * stride_n + tile // GROUP_TILES * stride_g
        b_scales = tl.load(scales + place)
        if HAS_ZEROS:
            b_zeros = tl.load(zeros + place)
        b_codes = tl.load(p_codes + tile * WIDTH)  # [N, K]
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        p_tile = p_x + tile * BLOCK_K
        total = add_tile(total, b_codes, p_tile, m_m, b_zeros, KIND, HAS_ZEROS, WORDS, HALF)
        acc += total * b_scales[:, None]
    return unshifted(acc, KIND, WORDS)


@triton.jit
def _gate_kernel(
    x, weight, scales, zeros, bias, order, tiles, out, hidden, inner, stride_x, stride_n, stride_g,
    alpha, limit,
    SLOTS: tl.constexpr, ACTIVATION: tl.constexpr, EVEN: tl.constexpr, CHAINED: tl.constexpr,
    KIND: tl.constexpr, GROUP_TILES: tl.constexpr, WORDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Inner values of pairs in the order of experts: half of a program's outputs are of gate."""
    start_next(CHAINED)
    HALF: tl.constexpr = BLOCK_N // 2
    o_n, o_half = tl.arange(0, BLOCK_N), tl.program_id(0) * HALF + tl.arange(0, HALF)
    feature = tl.program_id(0) * HALF + o_n % HALF
    await_previous(CHAINED)
    p_tile = tiles + tl.program_id(1) * 3
    expert, first, end = tl.load(p_tile), tl.load(p_tile + 1), tl.load(p_tile + 2)
    if expert < 0:
        return
    place = first + tl.arange(0, BLOCK_M)
    m_m = (place < end)[None, :]
    row = tl.load(order + place, mask=place < end, other=0) // SLOTS
    up_row = expert.to(tl.int64) * 2 * inner + o_n // HALF * inner + feature
    m_n = (feature < inner)[:, None]
    p_x = x + row.to(tl.int64)[None, :] * stride_x
    if KIND == "plain":
        p_weight = weight + up_row[:, None] * hidden
        acc = _product(p_weight, p_x, m_n, m_m, hidden, EVEN, BLOCK_M, BLOCK_N, BLOCK_K)
    elif KIND == "mxfp4":
        acc = _mxfp4_product(
            weight, scales, up_row, p_x, m_n, m_m, hidden, EVEN, BLOCK_M, BLOCK_N, BLOCK_K
        )
    else:
        acc = _coded_product(
            weight, scales, zeros, up_row, p_x, m_m, hidden, stride_n, stride_g,
            KIND, GROUP_TILES, WORDS, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    gate, up = tl.split(tl.permute(tl.reshape(acc, (2, HALF, BLOCK_M)), (1, 2, 0)))
    if bias is not None:
        p_bias = bias + expert.to(tl.int64) * 2 * inner + o_half
        gate += tl.load(p_bias, mask=o_half < inner, other=0.0)[:, None]
        up += tl.load(p_bias + inner, mask=o_half < inner, other=0.0)[:, None]
    value = activated(gate, up, alpha, limit, ACTIVATION)
    p_out = out + place.to(tl.int64)[None, :] * inner + o_half[:, None]
    tl.store(p_out, value.to(out.dtype.element_ty), mask=m_m & (o_half < inner)[:, None])


@triton.jit(do_not_specialize=["rows"])
def _down_kernel(
    x, weight, scales, zeros, bias, shares, order, tiles, out, rows, hidden, inner,
    stride_n, stride_g,
    SLOTS: tl.constexpr, EVEN: tl.constexpr, CHAINED: tl.constexpr,
    KIND: tl.constexpr, GROUP_TILES: tl.constexpr, WORDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Weighted outputs of pairs, each in its slot and row."""
    start_next(CHAINED)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    await_previous(CHAINED)
    p_tile = tiles + tl.program_id(1) * 3
    expert, first, end = tl.load(p_tile), tl.load(p_tile + 1), tl.load(p_tile + 2)
    if expert < 0:
        return
    place = first + tl.arange(0, BLOCK_M)
    m_m, m_n = (place < end)[None, :], (o_n < hidden)[:, None]
    pair = tl.load(order + place, mask=place < end, other=0)
    share = tl.load(shares + pair, mask=place < end, other=0.0)
    row, p_x = expert.to(tl.int64) * hidden + o_n, x + place.to(tl.int64)[None, :] * inner
    if KIND == "plain":
        p_weight = weight + row[:, None] * inner
        acc = _product(p_weight, p_x, m_n, m_m, inner, EVEN, BLOCK_M, BLOCK_N, BLOCK_K)
    elif KIND == "mxfp4":
        acc = _mxfp4_product(
            weight, scales, row, p_x, m_n, m_m, inner, EVEN, BLOCK_M, BLOCK_N, BLOCK_K
        )
    else:
        acc = _coded_product(
            weight, scales, zeros, row, p_x, m_m, inner, stride_n, stride_g,
            KIND, GROUP_TILES, WORDS, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if bias is not None:
        p_bias = bias + expert.to(tl.int64) * hidden + o_n
        acc += tl.load(p_bias, mask=o_n < hidden, other=0.0)[:, None]
    acc *= share[None, :]
    target = (pair % SLOTS).to(tl.int64) * rows + pair // SLOTS
    p_out = out + target[None, :] * hidden + o_n[:, None]
    tl.store(p_out, acc.to(out.dtype.element_ty), mask=m_m & m_n)


class _Matrix(NamedTuple):
    """Arguments of a matrix of all experts: plain, codes with scales, or MXFP4."""

    weight: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    strides: tuple[int, int]
    options: Mapping[str, str | int | bool]


def _matrix(stacked: Stacked, x: Tensor) -> _Matrix:
    if isinstance(stacked, Mxfp4Matrix):
        codes, scales = stacked.codes, stacked.scales
        assert codes.is_contiguous() and scales.is_contiguous(), "matrices lie below each other"
        if x.itemsize != 2:
            raise InvalidOption(
                "the kernel reads MXFP4 with rows of 16 bits: dequantize the matrices"
            )
        return _Matrix(
            codes, scales, None, (0, 0), {"KIND": "mxfp4", "GROUP_TILES": 1, "WORDS": False}
        )
    if isinstance(stacked, Tensor):
        assert stacked.is_contiguous(), "matrices lie below each other"
        return _Matrix(
            stacked, None, None, (0, 0), {"KIND": "plain", "GROUP_TILES": 1, "WORDS": False}
        )
    codes, scales, zeros = stacked.codes, stacked.scales, stacked.zeros
    assert codes.is_contiguous() and stacked.group % TILE == 0, "tiles have one scale per row"
    assert zeros is None or zeros.stride() == scales.stride(), "scales and zeros have one layout"
    words = chains(x) and x.dtype == torch.bfloat16
    options: dict[str, str | int | bool] = {
        "KIND": stacked.kind,
        "GROUP_TILES": stacked.group // TILE,
        "WORDS": words,
    }
    return _Matrix(codes, scales, zeros, (scales.stride(0), scales.stride(1)), options)


def blocks_of(tile: int, features: int, inner: int, dtype: torch.dtype, *, coded: bool) -> Blocks:
    """Sizes of a program for tiles of ``tile`` rows and a product of ``features`` outputs."""
    if coded:
        narrow = tile < 128 or features % 128
        return Blocks(tile, 64 if narrow else 128, TILE, 4 if narrow else 8, 3)
    if dtype.itemsize == 4:
        return Blocks(tile, 64, 32, 4, 2)
    if tile <= 32:
        return Blocks(tile, 64, 128 if inner % 128 == 0 else 64, 4, 4)
    if tile == 64 or features % 256:
        return Blocks(tile, 128, 64, 4 if tile == 64 else 8, 4)
    return Blocks(tile, 256, 64, 8, 4)


def named(activation: Activation) -> tuple[str, ClampedSwiglu]:
    """The kernels' name of an activation, and the numbers of a clamped SwiGLU."""
    if isinstance(activation, ClampedSwiglu):
        return "swigluoai", activation
    return activation, ClampedSwiglu()


def expert_mlp_triton(
    x: Float[Tensor, "rows hidden"],
    gate_up: Stacked,
    down: Stacked,
    routes: Routes,
    num_experts: int,
    activation: Activation,
    biases: tuple[Tensor | None, Tensor | None],
) -> Float[Tensor, "slots rows hidden"]:
    """See `looseleaf.ops.experts.mlp`."""
    (rows, slots), hidden = routes.experts.shape, x.shape[1]
    dtype = torch.float32 if rows <= FEW_ROWS else x.dtype
    out = torch.empty((slots, rows, hidden), dtype=dtype, device=x.device)
    if not rows:
        return out
    assert x.stride(1) == 1, "a row must be contiguous"
    tile, inner = tile_rows(rows * slots, num_experts), shape_of(down)[1]
    assert shape_of(gate_up) == (2 * inner * num_experts, hidden), "gate and up of all experts"
    groups = RowGroups(*group_rows_triton(routes.experts, num_experts, tile))
    values = torch.empty((rows * slots, inner), dtype=x.dtype, device=x.device)
    _launch_gate(x, gate_up, biases[0], groups, values, tile, slots, activation)
    _launch_down(values, down, biases[1], routes.weights, groups, out, tile)
    return out


def _launch_gate(
    x: Tensor,
    stacked: Stacked,
    bias: Tensor | None,
    groups: RowGroups,
    out: Float[Tensor, "pairs inner"],
    tile: int,
    slots: int,
    activation: Activation,
) -> None:
    """Writes ``activation(gate) * up`` of all pairs in the order of ``groups``."""
    hidden, inner = x.shape[1], out.shape[1]
    matrix, coded = _matrix(stacked, x), isinstance(stacked, ScaledMatrix)
    blocks, chained = blocks_of(tile, 2 * inner, hidden, x.dtype, coded=coded), chains(x)
    half = blocks.n // 2
    name, numbers = named(activation)
    even = hidden % blocks.k == inner % half == 0
    assert even or not coded, "codes come in whole tiles"
    _gate_kernel[(triton.cdiv(inner, half), len(groups.tiles))](
        x, *matrix[:3], bias, groups.order, groups.tiles, out, hidden, inner, x.stride(0),
        *matrix.strides, *numbers, SLOTS=slots, ACTIVATION=name, EVEN=even, CHAINED=chained,
        **matrix.options, **blocks.options(), launch_pdl=chained,
    )  # fmt: skip


def _launch_down(
    x: Float[Tensor, "pairs inner"],
    stacked: Stacked,
    bias: Tensor | None,
    shares: Float[Tensor, "rows slots"],
    groups: RowGroups,
    out: Float[Tensor, "slots rows hidden"],
    tile: int,
) -> None:
    """Writes the weighted products of all pairs to their slots and rows."""
    (slots, rows, hidden), inner = out.shape, x.shape[1]
    matrix, coded = _matrix(stacked, x), isinstance(stacked, ScaledMatrix)
    blocks, chained = blocks_of(tile, hidden, inner, x.dtype, coded=coded), chains(x)
    even = inner % blocks.k == hidden % blocks.n == 0
    assert even or not coded, "codes come in whole tiles"
    _down_kernel[(triton.cdiv(hidden, blocks.n), len(groups.tiles))](
        x, *matrix[:3], bias, shares, groups.order, groups.tiles, out, rows, hidden, inner,
        *matrix.strides, SLOTS=slots, EVEN=even, CHAINED=chained,
        **matrix.options, **blocks.options(), launch_pdl=chained,
    )  # fmt: skip

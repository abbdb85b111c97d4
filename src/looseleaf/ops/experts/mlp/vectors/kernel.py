"""Grouped products of vectors with MXFP4 on the device: a program per tile of rows and outputs.

A float of 4 bits has the exponent and the mantissa of a fp32 number, up to a power of two. So its
four bits are multiplied into two places of a word, for the magnitude and the sign, and a mask
leaves an exact fp32 number. Inputs and scales make up for the power. A thread reads 16 bytes of an
output, a block of 32 columns, and multiplies sums by the block's scale.

Dims of tiles are: outputs of a thread, parts of inner dims, neighbouring outputs, neighbouring
blocks, words of a block. Triton spreads lanes and warps from the last dim on, 3.6 from the first;
so the first four are exchanged by version, and no load needs another layout."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.dense.vector_lanes.kernel import (
    LINE_BYTES,
    SPREADS_FIRST,
    input_of,
    prefetch_lines,
)
from looseleaf.ops.experts.group import RowGroups
from looseleaf.ops.experts.group.kernel import group_rows_triton
from looseleaf.ops.experts.mlp import FEW_ROWS
from looseleaf.ops.experts.mlp.activation import Activation
from looseleaf.ops.experts.mlp.kernel import activated, named
from looseleaf.ops.experts.mlp.mxfp4 import Mxfp4Matrix
from looseleaf.ops.experts.mlp.vectors import BLOCKS, Tile
from looseleaf.ops.experts.route import Routes
from looseleaf.ops.scores.kernel import await_previous, chains, start_next

_BLOCKS = tl.constexpr(BLOCKS)
# a code is its value times 2**-126, inputs times 2**64 are finite up to 2**63, scales lack 2**30
_INPUT, _SCALE, _SHIFT = tl.constexpr(2.0**64), tl.constexpr(30), tl.constexpr(2.0**32)


@triton.jit
def _dim(o, DIM: tl.constexpr, FLIP: tl.constexpr):
    """``o`` [size] along one of the first four of five dims."""
    PLACE: tl.constexpr = 3 - DIM if FLIP else DIM
    if PLACE == 0:
        o = o[:, None, None, None, None]
    elif PLACE == 1:
        o = o[None, :, None, None, None]
    elif PLACE == 2:
        o = o[None, None, :, None, None]
    else:
        o = o[None, None, None, :, None]
    return o


@triton.jit
def _value(words, COLUMN: tl.constexpr):
    """The value of a word's code times 2**-126, fp32."""
    # every third code has one mask: copies of the others stay below bit 22 or leave the word
    MASK: tl.constexpr = (0xF00F00F << (4 * (COLUMN % 3))) & 0xFFFFFFFF
    code = words & MASK
    if COLUMN > 5:
        code = code >> 8
    BIT: tl.constexpr = 4 * COLUMN - 8 if COLUMN > 5 else 4 * COLUMN
    # magnitudes at bits 22 to 24, and the sign at bit 31
    both = code * ((1 << (22 - BIT)) + (1 << (28 - BIT)))
    return (both & 0x81C00000).to(tl.float32, bitcast=True)


@triton.jit
def _added(sums, p_x, words, scale, DTYPE: tl.constexpr):
    """``sums`` plus the products of a row with a word's eight columns each."""
    b_first, b_last = tl.load(p_x), tl.load(p_x + 1)
    products = _value(words, 0) * (input_of(b_first, 0, DTYPE) * _INPUT)
    for column in tl.static_range(1, 8):
        b_x = b_first if column < 4 else b_last
        products += _value(words, column) * (input_of(b_x, column % 4, DTYPE) * _INPUT)
    return sums + products * scale


@triton.jit
def _total(sums, FLIP: tl.constexpr):
    """Sums of all outputs of a program."""
    words = tl.sum(sums, 4)
    total = tl.trans(tl.sum(tl.sum(words, 0), 1)) if FLIP else tl.sum(tl.sum(words, 3), 1)
    return tl.reshape(total, (total.shape[0] * total.shape[1],)) * _SHIFT


@triton.jit
def _products(
    p_codes, p_scales, p_x, blocks, stride_b, stride_1, stride_2, stride_3, DTYPE: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, PARTS: tl.constexpr, ACROSS: tl.constexpr,
    FLIP: tl.constexpr,
):  # fmt: skip
    """Products of one to four rows with outputs; rows behind ``ROWS`` have those of the first.

    Rows are at ``p_x`` and at strides from there."""
    STEP: tl.constexpr = PARTS * _BLOCKS
    o_part, o_near = tl.arange(0, PARTS), tl.arange(0, _BLOCKS)
    o_block = _dim(o_part, 1, FLIP) * _BLOCKS + _dim(o_near, 3, FLIP)
    o_word = tl.arange(0, 4)[None, None, None, None, :]
    if FLIP:
        sums = tl.zeros((_BLOCKS, ACROSS, PARTS, OUTPUTS, 4), tl.float32)
    else:
        sums = tl.zeros((OUTPUTS, PARTS, ACROSS, _BLOCKS, 4), tl.float32)
    sums_1, sums_2, sums_3 = sums, sums, sums
    for start in range(0, blocks, STEP):
        # the last block serves behind the end, with a scale of 0
        block = tl.minimum(start + o_block, blocks - 1)
        # with this stride neighbours stay where their codes are loaded
        power = tl.load(p_scales + block * stride_b).to(tl.int32)
        words = tl.load(p_codes + (block * 4 + o_word)).to(tl.uint32, bitcast=True)
        # beyond the range of fp32 it is infinite
        scale = (tl.minimum(power + _SCALE, 255) << 23).to(tl.float32, bitcast=True)
        scale = tl.where(start + o_block < blocks, scale, 0.0)
        p_word = p_x + (block * 8 + 2 * o_word)
        sums = _added(sums, p_word, words, scale, DTYPE)
        if ROWS > 1:
            sums_1 = _added(sums_1, p_word + stride_1, words, scale, DTYPE)
        if ROWS > 2:
            sums_2 = _added(sums_2, p_word + stride_2, words, scale, DTYPE)
            sums_3 = _added(sums_3, p_word + stride_3, words, scale, DTYPE)
    total = _total(sums, FLIP)
    total_1, total_2, total_3 = total, total, total
    if ROWS > 1:
        total_1 = _total(sums_1, FLIP)
    if ROWS > 2:
        total_2, total_3 = _total(sums_2, FLIP), _total(sums_3, FLIP)
    return total, total_1, total_2, total_3


@triton.jit
def _prefetch(codes, scales, row, blocks, THREADS: tl.constexpr, PIECES: tl.constexpr):
    """Prefetches a row of codes and scales by ``PIECES`` threads each: ``row`` [THREADS]."""
    piece = tl.arange(0, THREADS) % PIECES * LINE_BYTES
    first = codes.to(tl.int64) + row * (blocks * 16)
    lines = prefetch_lines(scales.to(tl.int64) + row * blocks + tl.minimum(piece, blocks - 1))
    for start in range(0, blocks * 16, PIECES * LINE_BYTES):
        lines = prefetch_lines(first + tl.minimum(start + piece, blocks * 16 - 4))
    return lines


@triton.jit
def _of_tile(
    count, p_codes, p_scales, p_x, blocks, stride_b, stride_1, stride_2, stride_3,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, PARTS: tl.constexpr,
    ACROSS: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """`_products` of ``count`` rows, which are up to ``ROWS``, without work for further ones."""
    if ROWS == 1:
        total, total_1, total_2, total_3 = _products(
            p_codes, p_scales, p_x, blocks, stride_b, stride_1, stride_2, stride_3, DTYPE,
            ROWS, OUTPUTS, PARTS, ACROSS, FLIP,
        )  # fmt: skip
    elif count <= ROWS // 2:
        total, total_1, total_2, total_3 = _of_tile(
            count, p_codes, p_scales, p_x, blocks, stride_b, stride_1, stride_2, stride_3, DTYPE,
            ROWS // 2, OUTPUTS, PARTS, ACROSS, FLIP,
        )  # fmt: skip
    else:
        total, total_1, total_2, total_3 = _products(
            p_codes, p_scales, p_x, blocks, stride_b, stride_1, stride_2, stride_3, DTYPE,
            ROWS, OUTPUTS, PARTS, ACROSS, FLIP,
        )  # fmt: skip
    return total, total_1, total_2, total_3


# a stride of 1 is not specialized, see _products
@triton.jit(do_not_specialize=["stride_b"])
def _gate_vectors_kernel(
    x, codes, scales, bias, order, tiles, out, hidden, inner, stride_x, stride_b, alpha, limit,
    SLOTS: tl.constexpr, ACTIVATION: tl.constexpr, CHAINED: tl.constexpr, THREADS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, PARTS: tl.constexpr, ACROSS: tl.constexpr,
    FLIP: tl.constexpr,
):  # fmt: skip
    """Inner values of pairs in the order of experts: half of a program's outputs are of gate."""
    start_next(CHAINED)
    HALF: tl.constexpr = OUTPUTS * ACROSS // 2
    await_previous(CHAINED)
    p_tile = tiles + tl.program_id(1) * 3
    expert, first, end = tl.load(p_tile), tl.load(p_tile + 1), tl.load(p_tile + 2)
    if expert < 0:
        return
    start, base, blocks = tl.program_id(0) * HALF, expert.to(tl.int64) * 2 * inner, hidden // 32
    if CHAINED:
        PIECES: tl.constexpr = THREADS // (2 * HALF)
        output = tl.arange(0, THREADS) // PIECES
        line_row = output // HALF * inner + tl.minimum(start + output % HALF, inner - 1)
        _prefetch(codes, scales, base + line_row, blocks, THREADS, PIECES)
    stride, last = (stride_x // 4).to(tl.int64), end - 1
    at_0 = tl.load(order + first) // SLOTS * stride
    at_1, at_2, at_3 = at_0, at_0, at_0
    if ROWS > 1:
        at_1 = tl.load(order + tl.minimum(first + 1, last)) // SLOTS * stride
    if ROWS > 2:
        at_2 = tl.load(order + tl.minimum(first + 2, last)) // SLOTS * stride
        at_3 = tl.load(order + tl.minimum(first + 3, last)) // SLOTS * stride
    o_out = _dim(tl.arange(0, OUTPUTS), 0, FLIP) * ACROSS + _dim(tl.arange(0, ACROSS), 2, FLIP)
    row = base + (o_out // HALF * inner + tl.minimum(start + o_out % HALF, inner - 1))
    totals = _of_tile(
        end - first, codes + row * (blocks * 4), scales + row * blocks,
        x.to(tl.pointer_type(tl.int64)) + at_0, blocks, stride_b, at_1 - at_0, at_2 - at_0,
        at_3 - at_0, x.dtype.element_ty, ROWS, OUTPUTS, PARTS, ACROSS, FLIP,
    )  # fmt: skip
    o_half = start + tl.arange(0, HALF)
    m_half = o_half < inner
    for place in tl.static_range(ROWS):
        gate, up = tl.split(tl.permute(tl.reshape(totals[place], (2, HALF)), (1, 0)))
        if bias is not None:
            gate += tl.load(bias + base + o_half, mask=m_half, other=0.0)
            up += tl.load(bias + base + inner + o_half, mask=m_half, other=0.0)
        value = activated(gate, up, alpha, limit, ACTIVATION).to(out.dtype.element_ty)
        p_out = out + (first + place).to(tl.int64) * inner + o_half
        tl.store(p_out, value, mask=o_half < tl.where(first + place < end, inner, 0))


@triton.jit(do_not_specialize=["rows", "stride_b"])
def _down_vectors_kernel(
    x, codes, scales, bias, shares, order, tiles, out, rows, hidden, inner, stride_b,
    SLOTS: tl.constexpr, CHAINED: tl.constexpr, THREADS: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, PARTS: tl.constexpr, ACROSS: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """Weighted outputs of pairs, each in its slot and row."""
    start_next(CHAINED)
    N: tl.constexpr = OUTPUTS * ACROSS
    await_previous(CHAINED)
    p_tile = tiles + tl.program_id(1) * 3
    expert, first, end = tl.load(p_tile), tl.load(p_tile + 1), tl.load(p_tile + 2)
    if expert < 0:
        return
    start, base, blocks = tl.program_id(0) * N, expert.to(tl.int64) * hidden, inner // 32
    if CHAINED:
        PIECES: tl.constexpr = THREADS // N
        line_row = tl.minimum(start + tl.arange(0, THREADS) // PIECES, hidden - 1)
        _prefetch(codes, scales, base + line_row, blocks, THREADS, PIECES)
    o_out = _dim(tl.arange(0, OUTPUTS), 0, FLIP) * ACROSS + _dim(tl.arange(0, ACROSS), 2, FLIP)
    row = base + tl.minimum(start + o_out, hidden - 1)
    # a block of inputs has eight words, and no row is behind the last place
    stride, last = blocks * 8, end - 1 - first
    totals = _of_tile(
        end - first, codes + row * (blocks * 4), scales + row * blocks,
        x.to(tl.pointer_type(tl.int64)) + first.to(tl.int64) * stride, blocks, stride_b,
        tl.minimum(1, last) * stride, tl.minimum(2, last) * stride, tl.minimum(3, last) * stride,
        x.dtype.element_ty, ROWS, OUTPUTS, PARTS, ACROSS, FLIP,
    )  # fmt: skip
    o_n = start + tl.arange(0, N)
    m_n = o_n < hidden
    for place in tl.static_range(ROWS):
        pair = tl.load(order + tl.minimum(first + place, end - 1))
        total = totals[place]
        if bias is not None:
            total += tl.load(bias + base + o_n, mask=m_n, other=0.0)
        total *= tl.load(shares + pair)
        target = (pair % SLOTS).to(tl.int64) * rows + pair // SLOTS
        value = total.to(out.dtype.element_ty)
        mask = o_n < tl.where(first + place < end, hidden, 0)
        tl.store(out + target * hidden + o_n, value, mask=mask)


def takes(x: Tensor) -> bool:
    """Whether the kernels take rows: 16 bits, in words of four inputs."""
    return x.element_size() == 2 and x.stride(0) % 4 == 0 and x.data_ptr() % 8 == 0


def expert_vectors_triton(
    x: Float[Tensor, "rows hidden"],
    matrices: tuple[Mxfp4Matrix, Mxfp4Matrix],
    routes: Routes,
    num_experts: int,
    activation: Activation,
    biases: tuple[Tensor | None, Tensor | None],
    tile: Tile,
) -> Float[Tensor, "slots rows hidden"]:
    """See `looseleaf.ops.experts.mlp`: ``matrices`` of gate and up, and of down, in MXFP4."""
    (rows, slots), (gate_up, down) = routes.experts.shape, matrices
    assert takes(x), "rows of 16 bits in aligned words of four inputs"
    dtype = torch.float32 if rows <= FEW_ROWS else x.dtype
    out = torch.empty((slots, *x.shape), dtype=dtype, device=x.device)
    if not rows:
        return out
    inner = down.columns
    assert gate_up.features == 2 * inner * num_experts, "gate and up of all experts"
    assert gate_up.columns == x.shape[1], "a column for each input"
    groups = RowGroups(*group_rows_triton(routes.experts, num_experts, tile.rows))
    values = torch.empty((rows * slots, inner), dtype=x.dtype, device=x.device)
    chained = chains(x)
    launch_gate(x, gate_up, biases[0], groups, values, activation, tile, chained=chained)
    launch_down(values, down, biases[1], routes.weights, groups, out, tile, chained=chained)
    return out


def _matrix(stacked: Mxfp4Matrix) -> tuple[Tensor, Tensor]:
    """Codes in words of eight, and scales."""
    codes, scales = stacked.codes, stacked.scales
    assert codes.is_contiguous() and scales.is_contiguous(), "matrices lie below each other"
    return codes.view(torch.int32), scales


def _options(tile: Tile, chained: bool) -> dict[str, int | bool]:
    """The options of a launch."""
    sizes = {"ROWS": tile.rows, "OUTPUTS": tile.outputs, "PARTS": tile.parts}
    threads = {"ACROSS": tile.across, "THREADS": 32 * tile.warps, "num_warps": tile.warps}
    chain = {"CHAINED": chained, "launch_pdl": chained}
    return {**sizes, **threads, **chain, "FLIP": SPREADS_FIRST, "enable_fp_fusion": True}


def launch_gate(
    x: Tensor,
    stacked: Mxfp4Matrix,
    bias: Tensor | None,
    groups: RowGroups,
    out: Float[Tensor, "pairs inner"],
    activation: Activation,
    tile: Tile,
    *,
    chained: bool,
) -> None:
    """Writes ``activation(gate) * up`` of all pairs in the order of ``groups``."""
    hidden, inner, slots = x.shape[1], out.shape[1], len(out) // len(x)
    name, numbers = named(activation)
    half = tile.outputs * tile.across // 2
    _gate_vectors_kernel[(triton.cdiv(inner, half), len(groups.tiles))](
        x, *_matrix(stacked), bias, groups.order, groups.tiles, out, hidden, inner, x.stride(0), 1,
        *numbers, SLOTS=slots, ACTIVATION=name, **_options(tile, chained),
    )  # fmt: skip


def launch_down(
    x: Float[Tensor, "pairs inner"],
    stacked: Mxfp4Matrix,
    bias: Tensor | None,
    shares: Float[Tensor, "rows slots"],
    groups: RowGroups,
    out: Float[Tensor, "slots rows hidden"],
    tile: Tile,
    *,
    chained: bool,
) -> None:
    """Writes the weighted products of all pairs to their slots and rows."""
    (slots, rows, hidden), inner = out.shape, x.shape[1]
    outputs = tile.outputs * tile.across
    _down_vectors_kernel[(triton.cdiv(hidden, outputs), len(groups.tiles))](
        x, *_matrix(stacked), bias, shares, groups.order, groups.tiles, out, rows, hidden, inner, 1,
        SLOTS=slots, **_options(tile, chained),
    )  # fmt: skip

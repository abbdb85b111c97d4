"""The product of a few vectors with planes of codes on the device.

A word of codes has bytes of four neighbouring columns. The bits of a code go into the mantissa of a
constant float, so one subtraction yields ``code - zero`` exactly, without a conversion. A thread
reads 16 bytes of an output, which are 16 columns of each half of a unit. It sums their products
before it multiplies by the scale. A minimum multiplies the sum of the inputs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from looseleaf.ops.dense.plane_linear import UNIT, PlaneMatrix
from looseleaf.ops.dense.plane_linear.vectors import MAX_ROWS, TILES, Tile
from looseleaf.ops.dense.split_linear.kernel import prefetch
from looseleaf.ops.scores.kernel import await_previous, start_next

_COLUMNS = tl.constexpr(UNIT)
_BLOCK_UNITS = tl.constexpr(256 // UNIT)
_AHEAD_BYTES = 512
# the low halves of a word's bytes
_LOW = tl.constexpr(0x0F0F0F0F)


@triton.jit
def half(words, PLACE: tl.constexpr):
    """The float16 numbers in one half of words of 4 bytes, in fp32."""
    return (words >> (16 * PLACE)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _number(words, BYTE: tl.constexpr, PLACE: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr):
    """``code - ZERO`` of one byte of ``words``, fp32."""
    # a mantissa has 23 bits, so upper bytes move down
    BIT: tl.constexpr = BYTE % 2 * 8 + (4 * PLACE if BITS == 4 else 0)
    if BYTE > 1:
        words = words >> 16
    # an exponent with which the code's last bit is a 1
    bits = (words & (((1 << BITS) - 1) << BIT)) | ((150 - BIT) << 23)
    return bits.to(tl.float32, bitcast=True) - (2.0 ** (23 - BIT) + ZERO)


@triton.jit
def _whole_codes(b_codes, b_high, shift, PLACE: tl.constexpr, BITS: tl.constexpr):
    """Words whose bytes have whole codes, with other bits above; 4 bits are left in place."""
    if BITS == 5 or BITS == 6:
        upper = b_high >> shift if PLACE else b_high << (4 - shift)
        b_codes = ((b_codes >> (4 * PLACE)) & _LOW) | (upper & ~_LOW)
    return b_codes


@triton.jit
def _scale_and_min(
    b_words, b_tops, o_h, PLACE: tl.constexpr, HAS_MIN: tl.constexpr, HAS_BLOCKS: tl.constexpr
):
    """Scales and minimums of 16 columns in a half of a unit, fp32."""
    least = 0.0
    if not HAS_BLOCKS:
        scale = half(b_words, PLACE)
        if HAS_MIN:
            least = half(b_tops, PLACE)
    elif HAS_MIN:
        scale = half(b_tops, 0) * ((b_words >> (8 * PLACE)) & 255).to(tl.float32)
        least = -half(b_tops, 1) * ((b_words >> (16 + 8 * PLACE)) & 255).to(tl.float32)
    else:
        codes = (b_words >> (16 * PLACE + 8 * o_h)).to(tl.int8)
        scale = half(b_tops, 0) * codes.to(tl.float32)
    return scale, least


@triton.jit
def _added(
    sums, b_codes, scale, least, p_x, inside,
    DTYPE: tl.constexpr, PLACE: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr,
    HAS_MIN: tl.constexpr,
):  # fmt: skip
    """``sums`` [N, U, 2] plus the products of a row with 16 columns each."""
    # four inputs a word, as codes
    b_x = tl.load(p_x, mask=inside, other=0)
    products, inputs = tl.zeros(b_codes.shape, tl.float32), tl.zeros(b_x.shape, tl.float32)
    for byte in tl.static_range(4):
        value = (b_x >> (16 * byte)).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        products += _number(b_codes, byte, PLACE, BITS, ZERO) * value
        inputs += value
    sums += tl.sum(products, 3) * scale
    if HAS_MIN:
        sums += tl.sum(inputs, 3) * least
    return sums


# compiled once for each power of two of rows
@triton.jit(do_not_specialize=["rows"])
def _plane_vectors_kernel(
    x, codes, high, words, tops, out, rows, features, columns, stride_x, stride_row, stride_part,
    ROWS: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr,
    HAS_MIN: tl.constexpr, HAS_BLOCKS: tl.constexpr, CHAINED: tl.constexpr, AHEAD: tl.constexpr,
    THREADS: tl.constexpr, BLOCK_N: tl.constexpr, UNITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    start_next(CHAINED)
    DTYPE: tl.constexpr = x.dtype.element_ty
    # words of a unit's codes
    WORDS: tl.constexpr = 16 if BITS == 8 else 8
    part, row_units = tl.program_id(1), columns // _COLUMNS
    units = row_units // PARTS
    begin, end = part * units, part * units + units
    o_n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    # outputs, units, quarters of a unit and words of a quarter
    o_out, o_u = o_n[:, None, None, None], tl.arange(0, UNITS)
    o_h, o_w = tl.arange(0, 2)[None, None, :, None], tl.arange(0, 4)[None, None, None, :]
    p_codes = codes + o_out * row_units * WORDS + (4 * o_h + o_w)
    p_high, shift = high, o_h
    if BITS == 5:
        p_high, shift = high + o_n[:, None, None] * row_units, 2 * o_h + o_w // 2
    elif BITS == 6:
        p_high, shift = high + o_out * row_units * 4 + (0 * o_h + o_w), 2 * o_h
    p_x = x.to(tl.pointer_type(tl.int64)) + (4 * o_h + o_w)
    if CHAINED and AHEAD > 0:
        # each thread prefetches a piece of a row
        PIECES: tl.constexpr = THREADS // BLOCK_N
        thread = tl.arange(0, THREADS)
        row = (tl.program_id(0) * BLOCK_N + thread // PIECES).to(tl.int64)
        piece = row * row_units * (4 * WORDS) + begin * (4 * WORDS)
        piece += thread % PIECES * (AHEAD // PIECES)
        prefetch(codes.to(tl.int64) + piece, AHEAD // PIECES)
    await_previous(CHAINED)
    stride = stride_x // 4
    sums = tl.zeros((BLOCK_N, UNITS, 2), tl.float32)
    sums_1, sums_2, sums_3 = sums, sums, sums
    for start in tl.range(begin, end, UNITS, num_stages=STAGES):
        inside = (start + o_u < end)[None, :, None, None]
        # inputs behind the end are zeros, so its last unit serves there
        unit = tl.minimum(start + o_u, end - 1)
        o_unit, o_near = unit[None, :, None, None], unit[None, :, None]
        b_codes = tl.load(p_codes + o_unit * WORDS)  # [N, U, 2, 4]
        # both quarters read a unit's scales, so that no thread needs those of another
        near = tl.broadcast_to(o_near * features + o_n[:, None, None], (BLOCK_N, UNITS, 2))
        near = tl.max_contiguous(near, [1, 1, 1])
        b_words = tl.load(words + near)
        b_tops, b_high, b_more = b_words, b_codes, b_codes
        if HAS_BLOCKS:
            block = o_near // _BLOCK_UNITS * features + o_n[:, None, None]
            block = tl.broadcast_to(block, (BLOCK_N, UNITS, 2))
            b_tops = tl.load(tops + tl.max_contiguous(block, [1, 1, 1]))
        elif HAS_MIN:
            b_tops = tl.load(tops + near)
        if BITS == 5:
            fifth = tl.broadcast_to(p_high + o_near, (BLOCK_N, UNITS, 2))
            b_fifth = tl.load(tl.max_contiguous(fifth, [1, 1, 1]))
            b_high = (b_fifth[:, :, :, None] >> (o_w % 2 * 32)).to(tl.int32)
        elif BITS == 6:
            b_high = tl.load(p_high + o_unit * 4)
        elif BITS == 8:
            b_more = tl.load(p_codes + o_unit * WORDS + 8)
        for place in tl.static_range(2):
            b_half = _whole_codes(b_more if place else b_codes, b_high, shift, place, BITS)
            scale, least = _scale_and_min(
                b_words, b_tops, tl.arange(0, 2)[None, None, :], place, HAS_MIN, HAS_BLOCKS
            )
            p_half = p_x + (o_unit * 16 + 8 * place)
            sums = _added(
                sums, b_half, scale, least, p_half, inside, DTYPE, place, BITS, ZERO, HAS_MIN
            )
            if ROWS > 1:
                p_row = p_half + stride
                sums_1 = _added(
                    sums_1, b_half, scale, least, p_row, inside, DTYPE, place, BITS, ZERO, HAS_MIN
                )
            if ROWS > 2:
                p_row = p_half + 2 * stride
                sums_2 = _added(
                    sums_2, b_half, scale, least, p_row, inside, DTYPE, place, BITS, ZERO, HAS_MIN
                )
                # three rows have no fourth
                p_row = p_half + (rows - 1) * stride
                sums_3 = _added(
                    sums_3, b_half, scale, least, p_row, inside, DTYPE, place, BITS, ZERO, HAS_MIN
                )
    p_out = out + part * stride_part + o_n
    tl.store(p_out, tl.sum(tl.sum(sums, 2), 1).to(out.dtype.element_ty))
    if ROWS > 1:
        total = tl.sum(tl.sum(sums_1, 2), 1).to(out.dtype.element_ty)
        tl.store(p_out + stride_row, total)
    if ROWS > 2:
        total = tl.sum(tl.sum(sums_2, 2), 1).to(out.dtype.element_ty)
        tl.store(p_out + 2 * stride_row, total)
        # with three rows the third again, with equal bits
        total = tl.sum(tl.sum(sums_3, 2), 1).to(out.dtype.element_ty)
        tl.store(p_out + (rows - 1) * stride_row, total)


def takes(x: Tensor) -> bool:
    """Whether the kernel takes the rows: one to four, 16 bits, in words of four inputs."""
    aligned = x.stride(0) % 4 == 0 and x.data_ptr() % 8 == 0
    return 0 < len(x) <= MAX_ROWS and x.element_size() == 2 and aligned


def tile_of(rows: int) -> Tile:
    """The tile for a number of rows."""
    return TILES[triton.next_power_of_2(rows)]


def num_parts(features: int, columns: int, num_sms: int, tile: Tile) -> int:
    """Parts of the inner dims, so that programs fill the multiprocessors."""
    blocks, units = features // tile.outputs, columns // UNIT
    fitting = (n for n in (8, 4, 2) if units % n == 0 and units // n >= tile.units)
    return next((n for n in fitting if blocks * n <= tile.programs * num_sms), 1)


def constants(matrix: PlaneMatrix) -> dict[str, int | bool]:
    """A format's constants of kernels."""
    layout = matrix.layout
    return {
        "BITS": layout.bits,
        "ZERO": layout.zero,
        "HAS_MIN": layout.has_min,
        "HAS_BLOCKS": layout.block != layout.sub,
    }


def launch_vectors(
    x: Tensor, matrix: PlaneMatrix, out: Tensor, tile: Tile, *, chained: bool
) -> None:
    """Writes the product ``[parts, rows, features]`` of rows that it `takes` to ``out``."""
    (rows, columns), (parts, _, features) = x.shape, out.shape
    assert matrix.codes.is_contiguous() and matrix.words.is_contiguous(), "whole planes"
    codes = matrix.codes.view(torch.int32)
    high = codes
    if matrix.high is not None:
        # a unit has 8 bytes of fifth bits
        high = matrix.high.view(torch.int64 if matrix.layout.bits == 5 else torch.int32)
    tops = matrix.words if matrix.tops is None else matrix.tops
    # pieces of 16 bytes
    line = 16 * 32 * tile.warps // tile.outputs
    _plane_vectors_kernel[(features // tile.outputs, parts)](
        x, codes, high, matrix.words, tops, out, rows, features, columns, x.stride(0),
        out.stride(1), out.stride(0),
        ROWS=triton.next_power_of_2(rows), PARTS=parts, **constants(matrix), CHAINED=chained,
        AHEAD=min(_AHEAD_BYTES, matrix.codes.shape[1] // parts) // line * line,
        THREADS=32 * tile.warps, BLOCK_N=tile.outputs, UNITS=tile.units, STAGES=tile.stages,
        num_warps=tile.warps, enable_fp_fusion=True, launch_pdl=chained,
    )  # fmt: skip

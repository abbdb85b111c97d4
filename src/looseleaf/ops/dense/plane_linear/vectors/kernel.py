"""The product of a few vectors with planes of codes on the device.

A word of codes has bytes of four neighbouring columns. The bits of a code, wherever they are in a
word, are a subnormal fp32 number: the code times a tiny power of two. So one instruction converts a
code, and inputs make up for most of that power, exactly. Zeros and minimums multiply the sum of the
inputs. A thread reads 16 bytes of an output, which are 16 columns of each half of a unit, and
multiplies sums by their scale."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from looseleaf.ops.dense.plane_linear import UNIT, PlaneMatrix
from looseleaf.ops.dense.plane_linear.vectors import MAX_ROWS, Tile
from looseleaf.ops.dense.vector_lanes.kernel import (
    LINE_BYTES,
    SPREADS_FIRST,
    half,
    input_of,
    prefetch_lines,
)
from looseleaf.ops.scores.kernel import await_previous, start_next

_COLUMNS = tl.constexpr(UNIT)
_BLOCK_UNITS = tl.constexpr(256 // UNIT)
# a code is its number times 2**-149; inputs times 2**80 are finite up to 2**48
_INPUT, _SHIFT = tl.constexpr(80), tl.constexpr(2.0**69)
# the low halves of a word's bytes
_LOW = tl.constexpr(0x0F0F0F0F)


@triton.jit
def _product(words, value, BYTE: tl.constexpr, PLACE: tl.constexpr, BITS: tl.constexpr):
    """A code of one byte of ``words`` times ``value``, over _SHIFT."""
    # upper bytes move down, out of the bits of exponents
    BIT: tl.constexpr = BYTE % 2 * 8 + BYTE // 2 * 4 + (4 * PLACE if BITS == 4 else 0)
    if BYTE > 1:
        words = words >> 12
    codes = (words & (((1 << BITS) - 1) << BIT)).to(tl.float32, bitcast=True)
    return codes * (value * 2.0 ** (_INPUT - BIT))


@triton.jit
def _whole_codes(b_codes, b_high, shift, PLACE: tl.constexpr, BITS: tl.constexpr):
    """Words whose bytes have whole codes, with other bits above; 4 bits are left in place."""
    if BITS == 5 or BITS == 6:
        upper = b_high >> shift if PLACE else b_high << (4 - shift)
        b_codes = ((b_codes >> (4 * PLACE)) & _LOW) | (upper & ~_LOW)
    return b_codes


@triton.jit
def _scale_and_min(
    b_words, b_tops, o_h, PLACE: tl.constexpr, ZERO: tl.constexpr, HAS_MIN: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Scales of 16 columns in a half of a unit, and their value of code 0 over _SHIFT, fp32."""
    if not HAS_BLOCKS:
        scale = half(b_words, PLACE)
    elif HAS_MIN:
        scale = half(b_tops, 0) * ((b_words >> (8 * PLACE)) & 255).to(tl.float32)
    else:
        codes = (b_words >> (16 * PLACE + 8 * o_h)).to(tl.int8)
        scale = half(b_tops, 0) * codes.to(tl.float32)
    if HAS_MIN and HAS_BLOCKS:
        codes = (b_words >> (16 + 8 * PLACE)) & 255
        least = half(b_tops, 1) * (-1.0 / _SHIFT) * codes.to(tl.float32)
    elif HAS_MIN:
        least = half(b_tops, PLACE) * (1.0 / _SHIFT)
    else:
        least = scale * (-ZERO / _SHIFT)
    return scale, least


@triton.jit
def _added(
    sums, p_x, b_codes, scale, least, inside,
    DTYPE: tl.constexpr, PLACE: tl.constexpr, BITS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """``sums`` plus the products of a row with a word's columns each."""
    # four inputs a word, as codes
    b_x = tl.load(p_x) if WHOLE else tl.load(p_x, mask=inside, other=0)
    value = input_of(b_x, 0, DTYPE)
    products, inputs = _product(b_codes, value, 0, PLACE, BITS), value
    for byte in tl.static_range(1, 4):
        value = input_of(b_x, byte, DTYPE)
        products += _product(b_codes, value, byte, PLACE, BITS)
        inputs += value
    # the condition is always true: it makes inputs follow the layout of codes
    return sums + products * scale + inputs * tl.where((b_codes | 1) != 0, least, 0.0)


@triton.jit
def _outputs(sums, FLIP: tl.constexpr):
    """Sums of all outputs."""
    return tl.sum(tl.sum(sums, 2), 0 if FLIP else 1) * _SHIFT


# a stride of 1 is not specialized, see below
@triton.jit(do_not_specialize=["stride_n"])
def _plane_vectors_kernel(
    x, codes, high, words, tops, out, columns, stride_u, stride_n, stride_x, stride_row,
    stride_part,
    ROWS: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr,
    HAS_MIN: tl.constexpr, HAS_BLOCKS: tl.constexpr, CHAINED: tl.constexpr,
    THREADS: tl.constexpr, BLOCK_N: tl.constexpr, UNITS: tl.constexpr, STAGES: tl.constexpr,
    WHOLE: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    start_next(CHAINED)
    DTYPE: tl.constexpr = x.dtype.element_ty
    # words of a unit's codes
    WORDS: tl.constexpr = 16 if BITS == 8 else 8
    part, row_units = tl.program_id(1), columns // _COLUMNS
    units = row_units // PARTS
    begin, end = part * units, part * units + units
    o_n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    # quarters of units by outputs by words, or outputs first
    o_t = tl.arange(0, 2 * UNITS)[:, None, None] if FLIP else tl.arange(0, 2 * UNITS)[None, :, None]
    o_out = o_n[None, :, None] if FLIP else o_n[:, None, None]
    o_u, o_h, o_w = o_t // 2, o_t % 2, tl.arange(0, 4)[None, None, :]
    p_codes = codes + o_out * row_units * WORDS + (4 * o_h + o_w)
    p_high, shift = high, o_h
    if BITS == 5:
        p_high, shift = high + o_out * row_units, 2 * o_h + o_w // 2
    elif BITS == 6:
        p_high, shift = high + o_out * row_units * 4 + (0 * o_h + o_w), 2 * o_h
    # with this stride neighbours stay where their codes are loaded, not in a layout of their own
    o_near = o_out * stride_n + 0 * o_h
    p_x = x.to(tl.pointer_type(tl.int64)) + (4 * o_h + o_w)
    if CHAINED:
        # each thread prefetches a line of a row
        PIECES: tl.constexpr = THREADS // BLOCK_N
        thread = tl.arange(0, THREADS)
        row = (tl.program_id(0) * BLOCK_N + thread // PIECES).to(tl.int64)
        line = tl.minimum(thread % PIECES * LINE_BYTES, units * (4 * WORDS) - 4)
        start = (row * row_units + begin) * (4 * WORDS) + line
        prefetch_lines(codes.to(tl.int64) + start)
    await_previous(CHAINED)
    stride = stride_x // 4
    sums = tl.zeros((2 * UNITS, BLOCK_N, 4) if FLIP else (BLOCK_N, 2 * UNITS, 4), tl.float32)
    sums_1 = sums
    for start in tl.range(begin, end, UNITS, num_stages=STAGES):
        inside = start + o_u < end
        # inputs behind the end are zeros, so its last unit serves there
        unit = tl.minimum(start + o_u, end - 1)
        b_words = tl.load(words + (unit * stride_u + o_near))
        b_tops, b_fifth = b_words, b_words
        if HAS_BLOCKS:
            b_tops = tl.load(tops + (unit // _BLOCK_UNITS * stride_u + o_near))
        elif HAS_MIN:
            b_tops = tl.load(tops + (unit * stride_u + o_near))
        if BITS == 5:
            b_fifth = tl.load(p_high + (unit * stride_n + 0 * o_h))
        # the last load has the layout of all sums
        b_codes = tl.load(p_codes + unit * WORDS)
        b_high, b_more = b_codes, b_codes
        if BITS == 5:
            b_high = (b_fifth >> (o_w % 2 * 32)).to(tl.int32)
        elif BITS == 6:
            b_high = tl.load(p_high + unit * 4)
        elif BITS == 8:
            b_more = tl.load(p_codes + unit * WORDS + 8)
        for place in tl.static_range(2):
            b_half = _whole_codes(b_more if place else b_codes, b_high, shift, place, BITS)
            scale, least = _scale_and_min(b_words, b_tops, o_h, place, ZERO, HAS_MIN, HAS_BLOCKS)
            p_half = p_x + (unit * 16 + 8 * place)
            sums = _added(sums, p_half, b_half, scale, least, inside, DTYPE, place, BITS, WHOLE)
            if ROWS > 1:
                p_row = p_half + stride
                sums_1 = _added(
                    sums_1, p_row, b_half, scale, least, inside, DTYPE, place, BITS, WHOLE
                )
    p_out = out + part * stride_part + o_n
    tl.store(p_out, _outputs(sums, FLIP).to(out.dtype.element_ty))
    if ROWS > 1:
        total = _outputs(sums_1, FLIP).to(out.dtype.element_ty)
        tl.store(p_out + stride_row, total)


def takes(x: Tensor) -> bool:
    """Whether the kernel takes the rows: one or two, 16 bits, in words of four inputs."""
    aligned = x.stride(0) % 4 == 0 and x.data_ptr() % 8 == 0
    return 0 < len(x) <= MAX_ROWS and x.element_size() == 2 and aligned


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
    _plane_vectors_kernel[(features // tile.outputs, parts)](
        x, codes, high, matrix.words, tops, out, columns, *matrix.words.stride(),
        x.stride(0), out.stride(1), out.stride(0),
        ROWS=rows, PARTS=parts, **constants(matrix), CHAINED=chained,
        THREADS=32 * tile.warps, BLOCK_N=tile.outputs, UNITS=tile.units, STAGES=tile.stages,
        WHOLE=columns // UNIT // parts % tile.units == 0, FLIP=SPREADS_FIRST,
        num_warps=tile.warps, enable_fp_fusion=True, launch_pdl=chained,
    )  # fmt: skip

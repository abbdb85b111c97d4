"""The product of a few rows with planes of codes on the device, and the values of planes.

A program computes 64 outputs for all rows, over a part of the inner dims. It reads a unit of 64
columns at a time. The codes become weights in registers and are the first operand of the product.
As in `looseleaf.ops.dense.split_linear`, parts are added by a later kernel. Unlike there, a program
starts after the previous kernel: with an early start a decode step takes up to twice as long."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.dense.plane_linear import TILE_FEATURES, UNIT, PlaneMatrix, features_of
from looseleaf.ops.dense.plane_linear.vectors import TILE
from looseleaf.ops.dense.plane_linear.vectors.kernel import constants, launch_vectors, takes
from looseleaf.ops.dense.plane_linear.vectors.kernel import num_parts as vector_parts
from looseleaf.ops.dense.scaled_linear.kernel import add_parts, block_rows, num_parts
from looseleaf.ops.dense.vector_lanes.kernel import half
from looseleaf.ops.scores.kernel import chains

_HALF = tl.constexpr(UNIT // 2)
_BLOCK = tl.constexpr(256)
_ROW_BLOCK = 32


@triton.jit
def _numbers(
    b_codes, b_high, b_words, b_tops, PLACE: tl.constexpr,
    BITS: tl.constexpr, ZERO: tl.constexpr, HAS_MIN: tl.constexpr, HAS_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Values [N, 32] of the first or second half of a unit, fp32."""
    codes = b_codes.to(tl.int32)
    if BITS < 8:
        codes = (codes >> (4 * PLACE)) & 15
    if BITS == 5 or BITS == 6:
        WIDTH: tl.constexpr = 8 * (BITS - 4)
        shifts = (tl.arange(0, _HALF) // WIDTH * (BITS - 4) + 4 * PLACE)[None, :]
        codes |= ((b_high.to(tl.int32) >> shifts) & ((1 << (BITS - 4)) - 1)) << 4
    numbers = (codes - ZERO).to(tl.float32)
    if not HAS_BLOCKS:
        numbers *= half(b_words, PLACE)[:, None]
        if HAS_MIN:
            numbers += half(b_tops, PLACE)[:, None]
    elif HAS_MIN:
        scales = half(b_tops, 0) * ((b_words >> (8 * PLACE)) & 255).to(tl.float32)
        mins = half(b_tops, 1) * ((b_words >> (16 + 8 * PLACE)) & 255).to(tl.float32)
        numbers = numbers * scales[:, None] - mins[:, None]
    else:
        # a scale for 16 columns
        first = half(b_tops, 0) * (b_words >> (16 * PLACE)).to(tl.int8).to(tl.float32)
        second = half(b_tops, 0) * (b_words >> (16 * PLACE + 8)).to(tl.int8).to(tl.float32)
        is_first = (tl.arange(0, _HALF) < 16)[None, :]
        numbers *= tl.where(is_first, first[:, None], second[:, None])
    return numbers


# compiled once for all numbers of rows
@triton.jit(do_not_specialize=["rows"])
def _plane_linear_kernel(
    x, codes, high, words, tops, out, rows, features, columns, stride_x, stride_row, stride_part,
    PARTS: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, HAS_MIN: tl.constexpr,
    HAS_BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = x.dtype.element_ty
    # bytes of a unit's codes and further bits
    CODE_BYTES: tl.constexpr = 2 * _HALF if BITS == 8 else _HALF
    HIGH_BYTES: tl.constexpr = 8 if BITS == 5 else 16
    part, m_start = tl.program_id(1), tl.program_id(2) * BLOCK_M
    row_units = columns // (2 * _HALF)
    units = row_units // PARTS
    o_n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    o_m, o_k = m_start + tl.arange(0, BLOCK_M), tl.arange(0, _HALF)
    m_row = (o_m < rows)[None, :]
    row_codes = codes + o_n[:, None] * row_units * CODE_BYTES + o_k[None, :]
    row_high = high + o_n[:, None] * row_units * HIGH_BYTES + (o_k % HIGH_BYTES)[None, :]
    p_x = x + o_m[None, :] * stride_x + o_k[:, None]  # [K, M]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for unit in range(part * units, part * units + units):
        b_words = tl.load(words + unit * features + o_n)
        b_tops, b_high = b_words, b_words[:, None]
        if HAS_BLOCKS:
            b_tops = tl.load(tops + unit // (_BLOCK // (2 * _HALF)) * features + o_n)
        elif HAS_MIN:
            b_tops = tl.load(tops + unit * features + o_n)
        if BITS == 5 or BITS == 6:
            b_high = tl.load(row_high + unit * HIGH_BYTES)
        b_codes = tl.load(row_codes + unit * CODE_BYTES)  # [N, K]
        b_more = b_codes
        if BITS == 8:
            b_more = tl.load(row_codes + unit * CODE_BYTES + _HALF)
        b_x = tl.load(p_x + unit * 2 * _HALF, mask=m_row, other=0.0)
        b_weight = _numbers(
            b_codes, b_high, b_words, b_tops, 0, BITS, ZERO, HAS_MIN, HAS_BLOCKS
        ).to(DTYPE)  # fmt: skip
        acc = tl.dot(b_weight, b_x, acc)
        b_x = tl.load(p_x + unit * 2 * _HALF + _HALF, mask=m_row, other=0.0)
        b_weight = _numbers(
            b_more, b_high, b_words, b_tops, 1, BITS, ZERO, HAS_MIN, HAS_BLOCKS
        ).to(DTYPE)  # fmt: skip
        acc = tl.dot(b_weight, b_x, acc)
    p_out = out + part * stride_part + o_m[None, :].to(tl.int64) * stride_row + o_n[:, None]
    tl.store(p_out, acc.to(out.dtype.element_ty), mask=m_row)


@triton.jit
def _dequantize_planes_kernel(
    numbers, codes, high, words, tops, out, rows, start, features, columns,
    BITS: tl.constexpr, ZERO: tl.constexpr, HAS_MIN: tl.constexpr, HAS_BLOCKS: tl.constexpr,
    LISTED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A unit of some rows: those in ``numbers`` if LISTED, else those from ``start`` on."""
    CODE_BYTES: tl.constexpr = 2 * _HALF if BITS == 8 else _HALF
    HIGH_BYTES: tl.constexpr = 8 if BITS == 5 else 16
    unit, row_units = tl.program_id(1).to(tl.int64), columns // (2 * _HALF)
    o_row, o_k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, _HALF)
    inside = o_row < rows
    o_n = (start + o_row).to(tl.int64)
    if LISTED:
        o_n = tl.load(numbers + o_row, mask=inside, other=0).to(tl.int64)
    m_row = inside[:, None]
    p_codes = codes + (o_n * row_units + unit)[:, None] * CODE_BYTES + o_k[None, :]
    b_words = tl.load(words + unit * features + o_n, mask=inside, other=0)
    b_tops, b_high = b_words, b_words[:, None]
    if HAS_BLOCKS:
        block = unit // (_BLOCK // (2 * _HALF))
        b_tops = tl.load(tops + block * features + o_n, mask=inside, other=0)
    elif HAS_MIN:
        b_tops = tl.load(tops + unit * features + o_n, mask=inside, other=0)
    if BITS == 5 or BITS == 6:
        p_high = high + (o_n * row_units + unit)[:, None] * HIGH_BYTES
        b_high = tl.load(p_high + (o_k % HIGH_BYTES)[None, :], mask=m_row, other=0)
    b_codes = tl.load(p_codes, mask=m_row, other=0)
    b_more = b_codes
    if BITS == 8:
        b_more = tl.load(p_codes + _HALF, mask=m_row, other=0)
    p_out = out + o_row[:, None].to(tl.int64) * columns + unit * 2 * _HALF + o_k[None, :]
    first = _numbers(b_codes, b_high, b_words, b_tops, 0, BITS, ZERO, HAS_MIN, HAS_BLOCKS)
    tl.store(p_out, first.to(out.dtype.element_ty), mask=m_row)
    second = _numbers(b_more, b_high, b_words, b_tops, 1, BITS, ZERO, HAS_MIN, HAS_BLOCKS)
    tl.store(p_out + _HALF, second.to(out.dtype.element_ty), mask=m_row)


def plane_linear_triton(
    x: Float[Tensor, "rows columns"], matrices: Sequence[PlaneMatrix]
) -> Float[Tensor, "rows features"]:
    """See `looseleaf.ops.dense.plane_linear`."""
    return add_parts(plane_summands_triton(x, matrices), x.dtype)


def plane_summands_triton(
    x: Float[Tensor, "rows columns"], matrices: Sequence[PlaneMatrix]
) -> Float[Tensor, "parts rows features"]:
    """See `looseleaf.ops.dense.plane_linear`."""
    (rows, columns), features = x.shape, features_of(matrices)
    assert all(m.columns == columns for m in matrices), "the inner dims must agree"
    assert x.stride(1) == 1, "inner dims must be contiguous"
    num_sms = 1
    if x.is_cuda:
        num_sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    is_few = takes(x)
    parts = (
        vector_parts(features, columns, num_sms, TILE)
        if is_few
        else num_parts(rows, features, columns, num_sms)
    )
    dtype = x.dtype if parts == 1 else torch.float32
    out = torch.empty((parts, rows, features), dtype=dtype, device=x.device)
    first = 0
    for matrix in matrices if rows else ():
        target = out[:, :, first : first + matrix.features]
        if is_few:
            launch_vectors(x, matrix, target, TILE, chained=chains(x))
        else:
            launch(x, matrix, target)
        first += matrix.features
    return out


def launch(x: Tensor, matrix: PlaneMatrix, out: Tensor) -> None:
    """Writes the product to ``out``, with as many parts as ``out`` has."""
    (rows, columns), (parts, _, features) = x.shape, out.shape
    block_m = block_rows(rows)
    grid = (features // TILE_FEATURES, parts, triton.cdiv(rows, block_m))
    _plane_linear_kernel[grid](
        x, *_planes(matrix), out, rows, features, columns, x.stride(0), out.stride(1),
        out.stride(0), PARTS=parts, **constants(matrix), BLOCK_M=block_m, BLOCK_N=TILE_FEATURES,
        num_warps=4, num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip


def dequantize_planes_triton(
    matrix: PlaneMatrix, dtype: torch.dtype, chosen: slice | Int[Tensor, " rows"]
) -> Float[Tensor, "rows columns"]:
    """See `looseleaf.ops.dense.plane_linear`."""
    listed = isinstance(chosen, Tensor)
    start = 0 if isinstance(chosen, Tensor) else chosen.start
    rows = len(chosen) if isinstance(chosen, Tensor) else chosen.stop - chosen.start
    numbers = chosen.contiguous() if isinstance(chosen, Tensor) else matrix.words
    out = torch.empty((rows, matrix.columns), dtype=dtype, device=matrix.device)
    if rows:
        grid = (triton.cdiv(rows, _ROW_BLOCK), matrix.columns // UNIT)
        _dequantize_planes_kernel[grid](
            numbers, *_planes(matrix), out, rows, start, matrix.features, matrix.columns,
            **constants(matrix), LISTED=listed, BLOCK_N=_ROW_BLOCK, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def _planes(matrix: PlaneMatrix) -> tuple[Tensor, ...]:
    """All planes, with others in place of absent ones."""
    high = matrix.codes if matrix.high is None else matrix.high
    tops = matrix.words if matrix.tops is None else matrix.tops
    assert matrix.codes.is_contiguous() and matrix.words.is_contiguous(), "whole planes"
    return matrix.codes, high, matrix.words, tops

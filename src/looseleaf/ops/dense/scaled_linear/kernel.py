"""The product of a few rows with codes on the device, and FP8 rows for the library.

A program computes a block of outputs for all rows, over a part of the inner dims. The codes are the
first operand, so they go from memory to registers and to the tensor cores. Scales multiply the
sum of a group, not each weight. Parts are added by a second kernel in a fixed order."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.dense.scaled_linear import TILE, TILE_FEATURES, ScaledMatrix

_LARGEST_FP8 = tl.constexpr(448.0)
_LEAST = tl.constexpr(1e-12)


@triton.jit
def _numbers(codes, DTYPE: tl.constexpr):
    """4-bit codes plus `_bias`, by the bits of a float whose last place is 1."""
    if tl.bfloat16 == DTYPE:
        return (codes.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    if tl.float16 == DTYPE:
        return (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
    return codes.to(DTYPE)


@triton.jit
def _bias(DTYPE: tl.constexpr):
    if tl.bfloat16 == DTYPE:
        return 128.0
    if tl.float16 == DTYPE:
        return 1024.0
    return 0.0


# compiled once for all numbers of rows
@triton.jit(do_not_specialize=["rows"])
def _scaled_linear_kernel(
    x, codes, scales, zeros, out, rows, features, columns, groups, stride_x,
    PARTS: tl.constexpr, GROUP_TILES: tl.constexpr, PAIRS: tl.constexpr, HAS_ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = x.dtype.element_ty
    HALF: tl.constexpr = BLOCK_K // 2
    part, m_start = tl.program_id(1), tl.program_id(2) * BLOCK_M
    length = columns // PARTS
    o_n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    o_m = m_start + tl.arange(0, BLOCK_M)
    m_row = (o_m < rows)[None, :]
    if PAIRS:
        o_k = tl.arange(0, HALF)
        p_codes = codes + o_n[:, None] * (columns // 2) + part * (length // 2) + o_k[None, :]
    else:
        o_k = tl.arange(0, BLOCK_K)
        p_codes = codes + o_n[:, None] * columns + part * length + o_k[None, :]
    p_x = x + o_m[None, :] * stride_x + part * length + o_k[:, None]  # [K, M]
    p_scales = scales + o_n * groups
    p_zeros = zeros + o_n * groups
    first_tile = part * (length // BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for tile in range(0, length // BLOCK_K):
        b_codes = tl.load(p_codes)  # [N, K]
        b_x = tl.load(p_x, mask=m_row, other=0.0)  # [K, M]
        if PAIRS:
            b_more = tl.load(p_x + HALF, mask=m_row, other=0.0)
            total = tl.dot(_numbers(b_codes & 15, DTYPE), b_x)
            total = tl.dot(_numbers(b_codes >> 4, DTYPE), b_more, total)
            sums = tl.sum(b_x.to(tl.float32), 0) + tl.sum(b_more.to(tl.float32), 0)
        else:
            total = tl.dot(b_codes.to(DTYPE), b_x)
            sums = tl.sum(b_x.to(tl.float32), 0)
        group = (first_tile + tile) // GROUP_TILES
        b_scales = tl.load(p_scales + group)
        if HAS_ZEROS or PAIRS:
            offset = tl.zeros((BLOCK_N,), tl.float32)
            if PAIRS:
                offset += _bias(DTYPE)
            if HAS_ZEROS:
                offset += tl.load(p_zeros + group)
            total -= offset[:, None] * sums[None, :]
        acc += total * b_scales[:, None]
        p_codes += HALF if PAIRS else BLOCK_K
        p_x += BLOCK_K
    p_out = out + (part * rows + o_m)[None, :].to(tl.int64) * features + o_n[:, None]
    tl.store(p_out, acc.to(out.dtype.element_ty), mask=m_row)


@triton.jit
def _add_parts_kernel(parts, out, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * size + offsets, mask=inside, other=0.0)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _quantize_rows_kernel(x, codes, scales, columns, stride_x, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        inside = start + o_k < columns
        b_x = tl.load(x + row * stride_x + start + o_k, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(b_x))
    scale = tl.maximum(tl.max(largest, 0) / _LARGEST_FP8, _LEAST)
    tl.store(scales + row, scale)
    for start in range(0, columns, BLOCK):
        inside = start + o_k < columns
        b_x = tl.load(x + row * stride_x + start + o_k, mask=inside, other=0.0).to(tl.float32)
        b_codes = (b_x / scale).to(codes.dtype.element_ty)
        tl.store(codes + row * columns + start + o_k, b_codes, mask=inside)


def num_parts(rows: int, features: int, columns: int, num_sms: int) -> int:
    """Parts of the inner dims, so that programs fill the SMs about twice."""
    tiles = features // TILE_FEATURES * -(-rows // _block_rows(rows))
    fitting = (n for n in (8, 4, 2) if columns % (n * TILE) == 0 and columns // n >= 4 * TILE)
    return next((n for n in fitting if tiles * n <= 3 * num_sms), 1)


def _block_rows(rows: int) -> int:
    return 16 if rows <= 16 else 32 if rows <= 32 else 64


def scaled_linear_triton(
    x: Float[Tensor, "rows columns"], matrix: ScaledMatrix
) -> Float[Tensor, "rows features"]:
    """See `looseleaf.ops.dense.scaled_linear`."""
    (rows, columns), features = x.shape, matrix.features
    assert columns == matrix.columns, "the inner dims must agree"
    assert x.stride(1) == 1 and matrix.codes.is_contiguous(), "inner dims must be contiguous"
    out = torch.empty((rows, features), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    num_sms = 1
    if x.is_cuda:
        num_sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    parts = num_parts(rows, features, columns, num_sms)
    summands = out
    if parts > 1:
        summands = torch.empty((parts, rows, features), dtype=torch.float32, device=x.device)
    block_m, groups = _block_rows(rows), matrix.scales.shape[1]
    grid = (features // TILE_FEATURES, parts, triton.cdiv(rows, block_m))
    zeros = matrix.scales if matrix.zeros is None else matrix.zeros
    _scaled_linear_kernel[grid](
        x, matrix.codes, matrix.scales, zeros, summands, rows, features, columns, groups,
        x.stride(0), PARTS=parts, GROUP_TILES=matrix.group // TILE, PAIRS=matrix.kind == "int4",
        HAS_ZEROS=matrix.zeros is not None, BLOCK_M=block_m, BLOCK_N=TILE_FEATURES, BLOCK_K=TILE,
        num_warps=4, num_stages=4,
    )  # fmt: skip
    if parts > 1:
        size = rows * features
        _add_parts_kernel[(triton.cdiv(size, 1024),)](summands, out, size, PARTS=parts, BLOCK=1024)
    return out


def quantize_rows_triton(
    x: Float[Tensor, "rows columns"],
) -> tuple[Tensor, Float[Tensor, "rows 1"]]:
    """``x`` in e4m3 with one fp32 scale per row."""
    rows, columns = x.shape
    codes = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        _quantize_rows_kernel[(rows,)](x, codes, scales, columns, x.stride(0), BLOCK=1024)
    return codes, scales

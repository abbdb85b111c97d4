"""The product of a few rows with codes on the device, and FP8 rows for the library.

A program computes a block of outputs for all rows, over a part of the inner dims. The codes are the
first operand, so they go from memory to registers and to the tensor cores. On Hopper some
instructions on words of codes make bf16 numbers of them. Scales multiply the sum of a tile, not
each weight. As in `looseleaf.ops.dense.split_linear`, a program prefetches its codes before it
waits for the previous kernel, and parts are added by a later kernel."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.dense.scaled_linear import TILE, TILE_FEATURES, ScaledMatrix
from looseleaf.ops.dense.scaled_linear.vectors import MAX_ROWS as MAX_VECTORS
from looseleaf.ops.dense.scaled_linear.vectors.kernel import launch_vectors
from looseleaf.ops.dense.scaled_linear.vectors.kernel import num_parts as vector_parts
from looseleaf.ops.dense.split_linear.kernel import prefetch
from looseleaf.ops.scores.kernel import await_previous, chains, start_next

_LARGEST_FP8 = tl.constexpr(448.0)
_LEAST = tl.constexpr(1e-12)
_THREADS = tl.constexpr(128)
# e4m3 codes become bf16 numbers of 2**-120 times their value; rows make up for a half of that
_SHIFT = tl.constexpr(2.0**60)
_AHEAD_BYTES = 256


@triton.jit
def _low_pairs(codes, offsets):
    """bf16 of the low 4 bits minus ``offsets``, which are 128 plus the zeros."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 t;
        and.b32 t, $2, 0x0F0F0F0F;
        prmt.b32 $0, t, 0x43434343, 0x4140;
        prmt.b32 $1, t, 0x43434343, 0x4342;
        sub.rn.bf16x2 $0, $0, $3;
        sub.rn.bf16x2 $1, $1, $4;
        }""",
        "=&r,=&r,r,r,r", [codes, offsets], dtype=tl.bfloat16, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _high_pairs(codes, offsets):
    """bf16 of the high 4 bits minus ``offsets``."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 t;
        shr.u32 t, $2, 4;
        and.b32 t, t, 0x0F0F0F0F;
        prmt.b32 $0, t, 0x43434343, 0x4140;
        prmt.b32 $1, t, 0x43434343, 0x4342;
        sub.rn.bf16x2 $0, $0, $3;
        sub.rn.bf16x2 $1, $1, $4;
        }""",
        "=&r,=&r,r,r,r", [codes, offsets], dtype=tl.bfloat16, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _shifted_fp8(codes):
    """bf16 of e4m3 codes times 2**-120: sign, exponent and fraction in the places of bf16's."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 t, u, v;
        prmt.b32 t, $2, 0, 0x1404;
        shr.u32 u, t, 4;
        and.b32 v, t, 0x80008000;
        lop3.b32 $0, u, 0x07F007F0, v, 0xEA;
        prmt.b32 t, $2, 0, 0x3424;
        shr.u32 u, t, 4;
        and.b32 v, t, 0x80008000;
        lop3.b32 $1, u, 0x07F007F0, v, 0xEA;
        }""",
        "=&r,=&r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _numbers(b_codes, b_zeros, DTYPE: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """Codes minus zeros as numbers of the rows' dtype, which has them exactly."""
    b_numbers = b_codes.to(DTYPE)
    if HAS_ZEROS:
        b_numbers -= b_zeros.to(DTYPE)[:, None]
    return b_numbers


@triton.jit
def add_tile(
    acc, b_codes, p_x, m_row, b_zeros,
    KIND: tl.constexpr, HAS_ZEROS: tl.constexpr, WORDS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """``acc`` plus the product of a tile, without its scales."""
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    b_x = tl.load(p_x, mask=m_row, other=0.0)  # [K, M]
    if KIND == "int4":
        b_more = tl.load(p_x + HALF, mask=m_row, other=0.0)
        if WORDS:
            offsets = (b_zeros + 128.0).to(tl.bfloat16)[:, None]
            offsets = tl.broadcast_to(offsets, b_codes.shape)
            b_low, b_high = _low_pairs(b_codes, offsets), _high_pairs(b_codes, offsets)
        else:
            b_low = _numbers(b_codes & 15, b_zeros, DTYPE, HAS_ZEROS)
            b_high = _numbers(b_codes >> 4, b_zeros, DTYPE, HAS_ZEROS)
        acc = tl.dot(b_low, b_x, acc)
        acc = tl.dot(b_high, b_more, acc)
    elif KIND == "fp8" and WORDS:
        b_x = (b_x * _SHIFT).to(DTYPE)
        acc = tl.dot(_shifted_fp8(b_codes.to(tl.int8, bitcast=True)), b_x, acc)
    else:
        acc = tl.dot(_numbers(b_codes, b_zeros, DTYPE, HAS_ZEROS), b_x, acc)
    return acc


@triton.jit
def unshifted(acc, KIND: tl.constexpr, WORDS: tl.constexpr):
    """Sums of `add_tile` without the shift of its e4m3 codes."""
    if KIND == "fp8" and WORDS:
        acc *= _SHIFT
    return acc


# compiled once for all numbers of rows
@triton.jit(do_not_specialize=["rows"])
def _scaled_linear_kernel(
    x, codes, scales, zeros, out, rows, features, columns, stride_x, stride_n, stride_g,
    PARTS: tl.constexpr, GROUP_TILES: tl.constexpr, KIND: tl.constexpr, HAS_ZEROS: tl.constexpr,
    ONE_GROUP: tl.constexpr, WORDS: tl.constexpr, CHAINED: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    start_next(CHAINED)
    HALF: tl.constexpr = BLOCK_K // 2
    # bytes of a row of codes in a tile
    WIDTH: tl.constexpr = HALF if KIND == "int4" else BLOCK_K
    part, m_start = tl.program_id(1), tl.program_id(2) * BLOCK_M
    tiles = columns // BLOCK_K // PARTS
    o_n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    o_m, o_k = m_start + tl.arange(0, BLOCK_M), tl.arange(0, WIDTH)
    m_row = (o_m < rows)[None, :]
    row_bytes = columns // BLOCK_K * WIDTH
    p_codes = codes + o_n[:, None] * row_bytes + part * tiles * WIDTH + o_k[None, :]
    p_x = x + o_m[None, :] * stride_x + part * tiles * BLOCK_K + o_k[:, None]  # [K, M]
    p_scales, p_zeros = scales + o_n * stride_n, zeros + o_n * stride_n
    if CHAINED:
        # each thread prefetches a piece of a row
        PIECES: tl.constexpr = _THREADS // BLOCK_N
        thread = tl.arange(0, _THREADS)
        row = (tl.program_id(0) * BLOCK_N + thread // PIECES).to(tl.int64)
        start = part * tiles * WIDTH + thread % PIECES * (AHEAD // PIECES)
        prefetch((codes + row * row_bytes + start).to(tl.int64), AHEAD // PIECES)
    group = part * tiles // GROUP_TILES
    b_scales = tl.load(p_scales + group * stride_g)
    b_zeros = tl.zeros((BLOCK_N,), tl.float32)
    if HAS_ZEROS:
        b_zeros = tl.load(p_zeros + group * stride_g)
    await_previous(CHAINED)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for tile in range(0, tiles):
        b_codes = tl.load(p_codes)  # [N, K]
        if ONE_GROUP:
            acc = add_tile(acc, b_codes, p_x, m_row, b_zeros, KIND, HAS_ZEROS, WORDS, HALF)
        else:
            # the next scales arrive during this product
            after = (part * tiles + tl.minimum(tile + 1, tiles - 1)) // GROUP_TILES
            next_scales, next_zeros = tl.load(p_scales + after * stride_g), b_zeros
            if HAS_ZEROS:
                next_zeros = tl.load(p_zeros + after * stride_g)
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            total = add_tile(total, b_codes, p_x, m_row, b_zeros, KIND, HAS_ZEROS, WORDS, HALF)
            acc += total * b_scales[:, None]
            b_scales, b_zeros = next_scales, next_zeros
        p_codes += WIDTH
        p_x += BLOCK_K
    if ONE_GROUP:
        acc *= b_scales[:, None]
    acc = unshifted(acc, KIND, WORDS)
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
    """Parts of the inner dims, so that programs fill the SMs about three times."""
    tiles = features // TILE_FEATURES * -(-rows // block_rows(rows))
    fitting = (n for n in (8, 4, 2) if columns % (n * TILE) == 0 and columns // n >= 4 * TILE)
    return next((n for n in fitting if tiles * n <= 3 * num_sms), 1)


def block_rows(rows: int) -> int:
    """Rows of a program."""
    return 16 if rows <= 16 else 32 if rows <= 32 else 64


def scaled_linear_triton(
    x: Float[Tensor, "rows columns"], matrix: ScaledMatrix
) -> Float[Tensor, "rows features"]:
    """See `looseleaf.ops.dense.scaled_linear`."""
    return add_parts(scaled_summands_triton(x, matrix), x.dtype)


def add_parts(
    summands: Float[Tensor, "parts rows features"], dtype: torch.dtype
) -> Float[Tensor, "rows features"]:
    """The sum of ``summands``, rounded once to ``dtype``."""
    parts, *shape = summands.shape
    if parts == 1 and summands.dtype == dtype:
        return summands[0]
    out = torch.empty(shape, dtype=dtype, device=summands.device)
    size = out.numel()
    _add_parts_kernel[(triton.cdiv(size, 1024),)](
        summands, out, size, PARTS=parts, BLOCK=1024, enable_fp_fusion=True
    )
    return out


def scaled_summands_triton(
    x: Float[Tensor, "rows columns"], matrix: ScaledMatrix
) -> Float[Tensor, "parts rows features"]:
    """See `looseleaf.ops.dense.scaled_linear`."""
    (rows, columns), features = x.shape, matrix.features
    assert columns == matrix.columns, "the inner dims must agree"
    assert x.stride(1) == 1 and matrix.codes.is_contiguous(), "inner dims must be contiguous"
    num_sms = 1
    if x.is_cuda:
        num_sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    # tensor cores are faster from 4 bits
    is_few = rows in (1, 2, MAX_VECTORS) and matrix.kind != "int4"
    parts = (
        vector_parts(rows, matrix, num_sms)
        if is_few
        else num_parts(rows, features, columns, num_sms)
    )
    dtype = x.dtype if parts == 1 else torch.float32
    out = torch.empty((parts, rows, features), dtype=dtype, device=x.device)
    chained = chains(x)
    if is_few:
        launch_vectors(x, matrix, out, chained=chained)
    elif rows:
        launch(x, matrix, out, chained=chained, words=chained and x.dtype == torch.bfloat16)
    return out


def launch(x: Tensor, matrix: ScaledMatrix, out: Tensor, *, chained: bool, words: bool) -> None:
    """Writes the product to ``out``, with as many parts as ``out`` has.

    ``words`` are Hopper's instructions on words of codes, for bf16."""
    (rows, columns), (parts, _, features) = x.shape, out.shape
    block_m, scales = block_rows(rows), matrix.scales
    grid = (features // TILE_FEATURES, parts, triton.cdiv(rows, block_m))
    zeros = scales if matrix.zeros is None else matrix.zeros
    assert zeros.stride() == scales.stride(), "scales and zeros have one layout"
    _scaled_linear_kernel[grid](
        x, matrix.codes, scales, zeros, out, rows, features, columns, x.stride(0), *scales.stride(),
        PARTS=parts, GROUP_TILES=matrix.group // TILE, KIND=matrix.kind,
        HAS_ZEROS=matrix.zeros is not None, ONE_GROUP=scales.shape[1] == 1, WORDS=words,
        CHAINED=chained, AHEAD=min(_AHEAD_BYTES, matrix.codes.shape[1] // parts),
        BLOCK_M=block_m, BLOCK_N=TILE_FEATURES, BLOCK_K=TILE,
        num_warps=4, num_stages=4, enable_fp_fusion=True, launch_pdl=chained,
    )  # fmt: skip


def quantize_rows_triton(
    x: Float[Tensor, "rows columns"],
) -> tuple[Tensor, Float[Tensor, "rows 1"]]:
    """``x`` in e4m3 with one fp32 scale per row."""
    rows, columns = x.shape
    codes = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        _quantize_rows_kernel[(rows,)](
            x, codes, scales, columns, x.stride(0), BLOCK=1024, enable_fp_fusion=True
        )
    return codes, scales

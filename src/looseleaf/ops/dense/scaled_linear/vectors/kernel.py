"""The product of a few vectors with codes on the device: one program per block of outputs and part.

Codes become fp32 numbers by shifts: the exponent of a constant makes the code's last bit a 1. That
constant goes into the zero, which multiplies the sum of a tile's inputs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from looseleaf.ops.dense.scaled_linear import TILE, ScaledMatrix
from looseleaf.ops.scores.kernel import await_previous, start_next

_OUTPUTS = 16
# e4m3 codes become numbers of 2**-120 times their value; inputs make up for a half of that
_SHIFT = tl.constexpr(2.0**60)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


# compiled once for all matrices of a form
@triton.jit
def _one_vector_kernel(
    x, codes, scales, out, columns, stride_n,
    KIND: tl.constexpr, HOPPER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One row by a matrix with one scale per output; products are summed once, at the end."""
    start_next(HOPPER)
    o_n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    o_k = tl.arange(0, BLOCK_K)
    p_codes, p_x = codes + o_n[:, None] * columns + o_k[None, :], x + o_k
    await_previous(HOPPER)
    products, inputs = tl.zeros((BLOCK_N, BLOCK_K), tl.float32), tl.zeros((BLOCK_K,), tl.float32)
    for start in range(0, columns, BLOCK_K):
        inside = start + o_k < columns
        b_codes = tl.load(p_codes, mask=inside[None, :], other=0)
        b_x = tl.load(p_x, mask=inside, other=0.0).to(tl.float32)
        if KIND == "int8":
            numbers = _float((((b_codes.to(tl.int32) & 0xFF) ^ 0x80) << 15) | 0x43800000)
            inputs += b_x
        elif HOPPER:
            numbers = b_codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            numbers = _float((b_codes.to(tl.int32) << 20) & -0x78100000)
            b_x *= _SHIFT
        products += numbers * b_x[None, :]
        p_codes += BLOCK_K
        p_x += BLOCK_K
    total = tl.sum(products, 1)
    if KIND == "int8":
        total -= 384.0 * tl.sum(inputs, 0)
    elif not HOPPER:
        total *= _SHIFT
    total *= tl.load(scales + o_n * stride_n)
    tl.store(out + o_n, total.to(out.dtype.element_ty))


# compiled once for all matrices of a form
@triton.jit
def _scaled_vectors_kernel(
    x, codes, scales, zeros, out, features, columns, stride_x, stride_n, stride_g,
    ROWS: tl.constexpr, PARTS: tl.constexpr, GROUP_TILES: tl.constexpr, KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr, ONE_GROUP: tl.constexpr, CHAINED: tl.constexpr,
    BLOCK_N: tl.constexpr, TILES: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    start_next(CHAINED)
    part, num_tiles = tl.program_id(1), columns // BLOCK_K // PARTS
    o_n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    o_t, o_k = tl.arange(0, TILES), tl.arange(0, BLOCK_K)
    # outputs, tiles and dims of a tile
    o_x = (part * num_tiles + o_t)[None, :, None] * BLOCK_K + o_k[None, None, :]
    p_codes, p_x = codes + o_n[:, None, None] * columns + o_x, x + o_x
    await_previous(CHAINED)
    sums = tl.zeros((ROWS, BLOCK_N, TILES), tl.float32)
    o_row = tl.arange(0, ROWS)[:, None, None]
    for start in range(0, num_tiles, TILES):
        inside = (start + o_t < num_tiles)[None, :, None]
        b_codes = tl.load(p_codes, mask=inside, other=0).to(tl.int32)  # [N, T, K]
        group = (part * num_tiles + start + o_t) // GROUP_TILES
        near = (start + o_t < num_tiles)[None, :]
        p_scale = o_n[:, None] * stride_n + group[None, :] * stride_g
        offset = tl.zeros((BLOCK_N, TILES), tl.float32)
        if HAS_ZEROS:
            offset += tl.load(zeros + p_scale, mask=near, other=0.0)
        if KIND == "int8":
            numbers = _float((((b_codes & 0xFF) ^ 0x80) << 15) | 0x43800000)
            offset += 384.0
        else:
            numbers = _float((b_codes << 20) & -0x78100000)
        for row in tl.static_range(ROWS):
            b_x = tl.load(p_x + row * stride_x, mask=inside, other=0.0).to(tl.float32)
            if KIND == "fp8":
                b_x *= _SHIFT
            total = tl.sum(numbers * b_x, 2)  # [N, T]
            if HAS_ZEROS or KIND == "int8":
                total -= offset * tl.sum(b_x, 2)
            if not ONE_GROUP:
                total *= tl.load(scales + p_scale, mask=near, other=0.0)
            sums += tl.where(o_row == row, total[None, :, :], 0.0)
        p_codes += TILES * BLOCK_K
        p_x += TILES * BLOCK_K
    acc = tl.sum(sums, 2)  # [ROWS, N]
    if ONE_GROUP:
        acc *= tl.load(scales + o_n * stride_n)[None, :]
    if KIND == "fp8":
        acc *= _SHIFT
    p_out = out + (part * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64) * features
    tl.store(p_out + o_n[None, :], acc.to(out.dtype.element_ty))


def num_parts(rows: int, matrix: ScaledMatrix, num_sms: int) -> int:
    """Parts of the inner dims, so that programs fill the SMs; one row fills them without parts."""
    if rows == 1 and _is_plain(matrix):
        return 1
    features, columns = matrix.features, matrix.columns
    blocks = features // _OUTPUTS
    fitting = (n for n in (4, 2) if columns % (n * TILE) == 0)
    return next((n for n in fitting if blocks * n <= 8 * num_sms), 1)


def _is_plain(matrix: ScaledMatrix) -> bool:
    return matrix.scales.shape[1] == 1 and matrix.zeros is None


def launch_vectors(x: Tensor, matrix: ScaledMatrix, out: Tensor, *, chained: bool) -> None:
    """Writes the product ``[parts, rows, features]`` of 1, 2 or 4 rows by bytes to ``out``."""
    (rows, columns), (parts, _, features) = x.shape, out.shape
    scales, codes = matrix.scales, matrix.codes.view(torch.int8)
    if rows == 1 and _is_plain(matrix):
        _one_vector_kernel[(features // _OUTPUTS,)](
            x, codes, scales, out, columns, scales.stride(0), KIND=matrix.kind, HOPPER=chained,
            BLOCK_N=_OUTPUTS, BLOCK_K=512, num_warps=8, enable_fp_fusion=True, launch_pdl=chained,
        )  # fmt: skip
        return
    zeros = scales if matrix.zeros is None else matrix.zeros
    assert zeros.stride() == scales.stride(), "scales and zeros have one layout"
    _scaled_vectors_kernel[(features // _OUTPUTS, parts)](
        x, codes, scales, zeros, out, features, columns,
        x.stride(0), *scales.stride(),
        ROWS=rows, PARTS=parts, GROUP_TILES=matrix.group // TILE, KIND=matrix.kind,
        HAS_ZEROS=matrix.zeros is not None, ONE_GROUP=scales.shape[1] == 1, CHAINED=chained,
        BLOCK_N=_OUTPUTS, TILES=4, BLOCK_K=TILE,
        num_warps=4, enable_fp_fusion=True, launch_pdl=chained,
    )  # fmt: skip

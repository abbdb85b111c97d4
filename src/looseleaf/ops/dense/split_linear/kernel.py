"""The product of a few rows on the device: one program per block of outputs and part of the inner
dim.

The matrix does not depend on the previous kernel, which may leave memory idle. A program therefore
prefetches its matrix before it waits for that kernel."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.dense.split_linear import MAX_ROWS, TILE_FEATURES, TILE_INNER
from looseleaf.ops.scores.kernel import await_previous, chains, start_next

# tiles that a program prefetches to L2 while it waits
_TILES_AHEAD = 16
_THREADS = tl.constexpr(128)


@triton.jit
def prefetch(address, BYTES: tl.constexpr):
    """Prefetches ``BYTES`` at each address to L2, without a wait."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r", [address, BYTES], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


# compiled once for all numbers of rows
@triton.jit(do_not_specialize=["rows"])
def _split_linear_kernel(
    x, weight, out, rows, features, inner, stride_x,
    PARTS: tl.constexpr, CHAINED: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    start_next(CHAINED)
    part = tl.program_id(1)
    length = inner // PARTS
    o_m, o_k = tl.arange(0, BLOCK_M), part * length + tl.arange(0, BLOCK_K)
    o_n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    m_row = (o_m < rows)[:, None]
    p_x = x + o_m[:, None] * stride_x + o_k[None, :]
    p_weight = weight + o_n[:, None] * inner + o_k[None, :]
    if CHAINED:
        # each thread prefetches a piece of a row
        PIECES: tl.constexpr = _THREADS // BLOCK_N
        thread = tl.arange(0, _THREADS)
        row = (tl.program_id(0) * BLOCK_N + thread // PIECES).to(tl.int64)
        p_piece = weight + row * inner + part * length + thread % PIECES * (AHEAD // PIECES)
        prefetch(p_piece.to(tl.int64), AHEAD // PIECES * weight.dtype.element_ty.itemsize)
    await_previous(CHAINED)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, length, BLOCK_K):
        b_x = tl.load(p_x, mask=m_row, other=0.0)  # [M, K]
        b_weight = tl.load(p_weight)  # [N, K]
        acc += tl.dot(b_x, tl.trans(b_weight))
        p_x += BLOCK_K
        p_weight += BLOCK_K
    p_out = out + (part * rows + o_m)[:, None] * features + o_n[None, :]
    tl.store(p_out, acc, mask=m_row)


def split_linear_triton(
    x: Float[Tensor, "rows inner"], weight: Float[Tensor, "features inner"], parts: int
) -> Float[Tensor, "parts rows features"]:
    """See `looseleaf.ops.dense.split_linear`."""
    out = torch.empty((parts, len(x), len(weight)), dtype=torch.float32, device=x.device)
    _launch(x, weight, out)
    return out


def whole_linear_triton(
    x: Float[Tensor, "rows inner"], weight: Float[Tensor, "features inner"]
) -> Float[Tensor, "rows features"]:
    """See `looseleaf.ops.dense.split_linear`."""
    out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
    _launch(x, weight, out[None])
    return out


def _launch(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Writes the product to ``out``, with as many parts as ``out`` has."""
    (rows, inner), (parts, _, features) = x.shape, out.shape
    assert rows <= MAX_ROWS, "a program has all rows"
    assert features % TILE_FEATURES == 0 and inner % (parts * TILE_INNER) == 0, "tiles must fit"
    assert x.stride(1) == 1 and weight.is_contiguous(), "inner dims must be contiguous"
    if not rows:
        return
    chained, length = chains(x), inner // parts
    # a full warpgroup of rows: smaller tiles read the matrix more slowly
    _split_linear_kernel[(features // TILE_FEATURES, parts)](
        x, weight, out, rows, features, inner, x.stride(0), PARTS=parts, CHAINED=chained,
        AHEAD=min(_TILES_AHEAD * TILE_INNER, length),
        BLOCK_M=MAX_ROWS, BLOCK_N=TILE_FEATURES, BLOCK_K=TILE_INNER,
        num_warps=4, num_stages=4, enable_fp_fusion=True, launch_pdl=chained,
    )  # fmt: skip

"""Argmax on the device in two passes: one program per block of a row, then one program per row.

The blocks keep all SMs busy even for a few rows."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.scores.kernel import await_previous, chains, start_next

_BLOCK = 4096
# larger than every index
_NO_INDEX = tl.constexpr(2147483647)


@triton.jit
def _first_of_largest(values, indices, last):
    """The largest of ``values`` and its first index, at most ``last``."""
    largest = tl.max(values, 0)
    index = tl.min(tl.where(values == largest, indices, _NO_INDEX), 0)
    return largest, tl.minimum(index, last)


@triton.jit
def _blocks_kernel(
    logits, block_max, block_argmax, vocab, stride_row, CHAINED: tl.constexpr, BLOCK: tl.constexpr
):
    start_next(CHAINED)
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    index = block * BLOCK + tl.arange(0, BLOCK)
    await_previous(CHAINED)
    value = tl.load(logits + row * stride_row + index, mask=index < vocab, other=float("-inf"))
    value = value.to(tl.float32)
    # NaN equals nothing
    value = tl.where(value == value, value, float("-inf"))
    largest, first = _first_of_largest(value, index, vocab - 1)
    target = row * tl.num_programs(0) + block
    tl.store(block_max + target, largest)
    tl.store(block_argmax + target, first)


@triton.jit
def _row_kernel(
    block_max, block_argmax, out, blocks, last, CHAINED: tl.constexpr, BLOCK: tl.constexpr
):
    start_next(CHAINED)
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    m_block, target = block < blocks, row * blocks + block
    await_previous(CHAINED)
    value = tl.load(block_max + target, mask=m_block, other=float("-inf"))
    index = tl.load(block_argmax + target, mask=m_block, other=_NO_INDEX)
    _, first = _first_of_largest(value, index, last)
    tl.store(out + row, first.to(tl.int64))


def likeliest_triton(logits: Float[Tensor, "rows vocab"]) -> Int[Tensor, " rows"]:
    """See `looseleaf.ops.dense.likeliest`."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    assert logits.stride(1) == 1, "a row must be contiguous"
    chained, blocks = chains(logits), triton.cdiv(vocab, _BLOCK)
    block_max = torch.empty((rows, blocks), dtype=torch.float32, device=logits.device)
    block_argmax = torch.empty((rows, blocks), dtype=torch.int32, device=logits.device)
    _blocks_kernel[(blocks, rows)](
        logits, block_max, block_argmax, vocab, logits.stride(0), CHAINED=chained, BLOCK=_BLOCK,
        num_warps=4, enable_fp_fusion=True, launch_pdl=chained,
    )  # fmt: skip
    _row_kernel[(rows,)](
        block_max, block_argmax, out, blocks, vocab - 1, CHAINED=chained,
        BLOCK=triton.next_power_of_2(blocks), num_warps=1, enable_fp_fusion=True,
        launch_pdl=chained,
    )  # fmt: skip
    return out

"""Copies from pinned memory on the device: one program per block."""

import triton
import triton.language as tl
from torch import Tensor

from looseleaf.ops.fetch_numbers import BLOCK, num_blocks


# compiled once for all numbers of elements
@triton.jit(do_not_specialize=["count"])
def _fetch_numbers_kernel(source, target, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_index = index < count
    # .cv: the host writes between two runs, so a cached value may be stale
    numbers = tl.load(source + index, mask=m_index, cache_modifier=".cv")
    tl.store(target + index, numbers, mask=m_index)


def fetch_numbers_triton(source: Tensor, target: Tensor) -> None:
    """See `looseleaf.ops.fetch_numbers`."""
    assert source.shape == target.shape and source.dtype == target.dtype, "both must be alike"
    assert source.is_contiguous() and target.is_contiguous(), "both must be contiguous"
    count = target.numel()
    if count:
        _fetch_numbers_kernel[(num_blocks(count),)](
            source, target, count, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=True
        )


@triton.jit(do_not_specialize=["blocks", "length"])
def _fetch_turn_kernel(source, target, fetched, blocks, length, BLOCK: tl.constexpr):
    # every run has the same number of programs, so the counter gives the row
    buffer = tl.atomic_add(fetched, 1, sem="relaxed") // blocks % 2
    row = source + buffer * length
    count = tl.load(row + tl.program_id(0), cache_modifier=".cv")
    index = tl.arange(0, BLOCK)
    m_index, block = index < count, tl.program_id(0) * BLOCK
    numbers = tl.load(row + blocks + block + index, mask=m_index, cache_modifier=".cv")
    tl.store(target + block + index, numbers, mask=m_index)


def fetch_turn_triton(source: Tensor, target: Tensor, fetched: Tensor) -> None:
    """See `looseleaf.ops.fetch_numbers`."""
    assert source.is_contiguous() and target.is_contiguous(), "both must be contiguous"
    blocks = num_blocks(target.numel())
    assert source.shape == (2, blocks + target.numel()), "source is [2, blocks + numbers]"
    if blocks:
        _fetch_turn_kernel[(blocks,)](
            source, target, fetched, blocks, source.shape[1], BLOCK=BLOCK, num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip

"""The fetching of numbers on the device: as many programs as there are blocks."""

import triton
import triton.language as tl
from torch import Tensor

from looseleaf.ops.fetch_numbers import BLOCK, num_blocks


# for however many numbers it is compiled once
@triton.jit(do_not_specialize=["count"])
def _fetch_numbers_kernel(source, target, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = place < count
    # the host writes between two runs: what a cache has may be what stood there before
    numbers = tl.load(source + place, mask=known, cache_modifier=".cv")
    tl.store(target + place, numbers, mask=known)


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
    # every run has as many programs, so how many there were before tells whose turn it is
    turn = tl.atomic_add(fetched, 1, sem="relaxed") // blocks % 2
    row = source + turn * length
    used = tl.load(row + tl.program_id(0), cache_modifier=".cv")
    place = tl.arange(0, BLOCK)
    known, block = place < used, tl.program_id(0) * BLOCK
    numbers = tl.load(row + blocks + block + place, mask=known, cache_modifier=".cv")
    tl.store(target + block + place, numbers, mask=known)


def fetch_turn_triton(source: Tensor, target: Tensor, fetched: Tensor) -> None:
    """See `looseleaf.ops.fetch_numbers`."""
    assert source.is_contiguous() and target.is_contiguous(), "both must be contiguous"
    blocks = num_blocks(target.numel())
    assert source.shape == (2, blocks + target.numel()), "two rows, and what is fetched of each"
    if blocks:
        _fetch_turn_kernel[(blocks,)](
            source, target, fetched, blocks, source.shape[1], BLOCK=BLOCK, num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip

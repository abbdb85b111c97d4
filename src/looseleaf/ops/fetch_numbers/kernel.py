"""The fetching of numbers on the device: as many programs as there are blocks."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


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
        _fetch_numbers_kernel[(triton.cdiv(count, _BLOCK),)](
            source, target, count, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=True
        )

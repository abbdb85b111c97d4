"""The order of lanes over dims, and prefetches of lines."""

import triton
import triton.language as tl

LINE_BYTES = tl.constexpr(128)
"""Bytes of a line of L2."""

SPREADS_FIRST = tuple(int(number) for number in triton.__version__.split(".")[:2]) < (3, 7)
"""Whether Triton spreads lanes over the first of equal dims, as 3.6 does, and not over the last."""


@triton.jit
def prefetch_lines(address):
    """Prefetches the line at each address to L2, without a wait; returns zeros.

    A bulk prefetch of each thread is compiled to a loop over the lanes of a warp."""
    return tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip

"""The order of lanes over dims, prefetches of lines, and inputs of 16 bits in words."""

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


@triton.jit
def half(words, PLACE: tl.constexpr):
    """The float16 numbers in one half of words of 4 bytes, in fp32."""
    return (words >> (16 * PLACE)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def input_of(b_x, PLACE: tl.constexpr, DTYPE: tl.constexpr):
    """One of the four inputs in 8 bytes, fp32."""
    pair = (b_x >> (PLACE // 2 * 32)).to(tl.int32)
    if DTYPE.is_fp16():
        value = half(pair, PLACE % 2)
    else:
        # the upper half of a fp32 number
        pair = pair & -0x10000 if PLACE % 2 else pair << 16
        value = pair.to(tl.float32, bitcast=True)
    return value

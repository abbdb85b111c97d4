"""Dtypes of pages, conversions to and from them, and whether values have pages of their own.

Besides the model dtypes, pages may hold e4m3: one sign, four exponent and three mantissa bits. Its
largest number is 448 and its smallest step 2^-9. Larger numbers saturate, since pages hold finite
numbers only."""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0


def to_pages(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in the page dtype ``dtype``; e4m3 saturates."""
    if dtype is FP8:
        # PyTorch versions differ in whether the cast saturates
        return x.clamp(-FP8_LARGEST, FP8_LARGEST).to(dtype)
    return x.to(dtype)


def widen(pages: Tensor) -> Tensor:
    """``pages`` in fp32; fp64 stays fp64."""
    return pages if pages.dtype is torch.float64 else pages.float()


def same_memory(k_pages: Tensor, v_pages: Tensor) -> bool:
    """Whether the keys are the values: both pages are one tensor, and only keys are written."""
    return k_pages.data_ptr() == v_pages.data_ptr()

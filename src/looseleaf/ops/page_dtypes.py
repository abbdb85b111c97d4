"""The dtypes that pages may hold, and how numbers get into them.

Besides the dtypes of models there is e4m3, eight bits with a sign, four of exponent and three of
mantissa: 448 at most, three bits of precision from 2^-6 on, steps of 2^-9 below. What is larger is
stored as 448, since a page holds finite numbers only; what is read is widened before it is used.
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0


def to_pages(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` as pages of ``dtype`` hold it."""
    if dtype is FP8:
        # whether a cast saturates depends on the version of PyTorch
        return x.clamp(-FP8_LARGEST, FP8_LARGEST).to(dtype)
    return x.to(dtype)


def widened(pages: Tensor) -> Tensor:
    """What was read of pages as fp32; fp64 stays."""
    return pages if pages.dtype is torch.float64 else pages.float()

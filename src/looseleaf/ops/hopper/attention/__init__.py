"""Attention on Hopper GPUs over 64 or 128 packed rows, for 16-bit pages and plain rules.

Both attention operators launch this kernel; it is not an operator itself."""

import torch
from torch import Tensor

from looseleaf.types import ScoreRule

PACKED_ROWS = 128
"""Packed rows of a program with two consumer warpgroups; each warpgroup has 64."""

PROGRAMS = {1: 2, 2: 1}
"""Programs per SM, by the number of their consumer warpgroups."""


def serves(k_pages: Tensor, rule: ScoreRule, *, spans: bool = False) -> bool:
    """Whether the kernel supports the device, pages and rule.

    ``spans``: the pages of a span list, which may also have 128 slots, the size of a tile."""
    return (
        k_pages.is_cuda
        and torch.cuda.get_device_capability(k_pages.device)[0] == 9
        and k_pages.itemsize == 2
        and k_pages.shape[3] in (64, 128)
        and k_pages.shape[2] in ((16, 32, 64, 128) if spans else (16, 32, 64))
        and k_pages.is_contiguous()
        and rule.is_plain
    )

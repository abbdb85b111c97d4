"""Attention on Hopper GPUs for 64 or 128 packed rows at a time: what the two attention operators
launch there for 16-bit pages and plain rules; no operator of its own."""

import torch
from torch import Tensor

from looseleaf.types import ScoreRule

PACKED_ROWS = 128
"""Packed rows of a program with two computing groups, 64 for each; one with one group has 64."""

PROGRAMS = {1: 2, 2: 1}
"""Programs that share a multiprocessor, by their computing groups."""


def serves(k_pages: Tensor, rule: ScoreRule, *, spans: bool = False) -> bool:
    """Whether the device has the kernel for such pages and rules; ``spans``: for those of a span
    list, whose tiles are never smaller than such a page."""
    return (
        k_pages.is_cuda
        and torch.cuda.get_device_capability(k_pages.device)[0] == 9
        and k_pages.itemsize == 2
        and k_pages.shape[3] in (64, 128)
        and k_pages.shape[2] in ((16, 32, 64, 128) if spans else (16, 32, 64))
        and k_pages.is_contiguous()
        and rule.is_plain
    )

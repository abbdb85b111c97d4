"""Memory of the host for what is read at random: in huge pages, where the system has them."""

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

# below a huge page nothing is gained
_LEAST = 4 << 20


def host_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros whose memory is taken page by page as it is written.

    A search touches a few hundred bytes here and there of gigabytes: with small pages most of its
    reads would wait for the table of pages first."""
    size = math.prod(shape) * dtype.itemsize
    if size < _LEAST or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(tuple(shape), dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        # a system without them has small ones
        return torch.zeros(tuple(shape), dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))

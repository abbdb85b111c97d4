"""Host memory for random reads, in huge pages where the system has them."""

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

# smaller tensors gain nothing from huge pages
_MIN_BYTES = 4 << 20


def host_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros, allocated lazily page by page.

    An index search reads a few hundred bytes at random places in gigabytes. With small pages, most
    of these reads miss the TLB."""
    size = math.prod(shape) * dtype.itemsize
    if size < _MIN_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(tuple(shape), dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        # the kernel may be built without huge pages
        return torch.zeros(tuple(shape), dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))

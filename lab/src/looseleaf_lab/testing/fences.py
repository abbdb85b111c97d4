"""Device memory with fences: what reads past the end of a tensor, or a tensor that was freed, is an
illegal access, and what reads numbers that nobody wrote finds none that make sense.

PyTorch's own allocator hands out pieces of large blocks, so a kernel that goes too far finds the
next tensor, and mostly nobody notices. Here each tensor lies at the end of a mapping of its own,
filled with 0x7f; freed, it is unmapped. Takes 2 MiB a tensor, and some 0.3 ms."""

import ctypes
from importlib import resources
from typing import NamedTuple

import torch

from looseleaf.errors import InvalidOption
from looseleaf.ops.native.native_build import load_library


class Fenced(NamedTuple):
    """Tensors allocated so far, those unmapped again, and those that stay for graphs."""

    allocated: int
    unmapped: int
    kept: int


class Fences:
    """From now on all device memory of this process has fences; there is no way back.

    Raises InvalidOption where PyTorch has taken memory already, or sees no GPU."""

    def __init__(self) -> None:
        if not torch.cuda.is_available() or torch.cuda.is_initialized():
            raise InvalidOption("fences are for a GPU that this process has not used yet")
        source = (
            resources.files("looseleaf_lab.testing")
            .joinpath("fences.c")
            .read_text(encoding="utf-8")
        )
        self._library = load_library(source, ())
        names = "looseleaf_alloc", "looseleaf_free"
        allocator = torch.cuda.memory.CUDAPluggableAllocator(self._library._name, *names)
        torch.cuda.memory.change_current_allocator(allocator)

    @property
    def counts(self) -> Fenced:
        """What was done so far."""
        numbers = (ctypes.c_longlong * 3).in_dll(self._library, "looseleaf_fenced")
        return Fenced(*numbers)

"""Device memory with fences: a read past a tensor's end or of a freed tensor is an illegal access,
and unwritten memory has invalid values.

PyTorch's own allocator returns pieces of large blocks, so an overrun reads the next tensor, mostly
unnoticed. Here each tensor is at the end of its own mapping, filled with 0x7f, and is unmapped when
freed. A tensor costs 2 MiB and about 0.3 ms."""

import ctypes
from importlib import resources
from typing import NamedTuple

import torch

from looseleaf.errors import InvalidOption
from looseleaf.ops.native.native_build import load_library


class Fenced(NamedTuple):
    """Numbers of tensors: allocated, unmapped, and kept for graphs."""

    allocated: int
    unmapped: int
    kept: int


class Fences:
    """Gives all further device memory of this process fences, permanently.

    Raises InvalidOption without a GPU, or if PyTorch has already allocated device memory."""

    def __init__(self) -> None:
        if not torch.cuda.is_available() or torch.cuda.is_initialized():
            raise InvalidOption("fences need a GPU that this process has not used yet")
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
        """The numbers so far."""
        numbers = (ctypes.c_longlong * 3).in_dll(self._library, "looseleaf_fenced")
        return Fenced(*numbers)

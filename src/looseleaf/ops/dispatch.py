"""Which implementation of an operator runs: the one asked for, or the device's own.

``reference`` reads like the equation and runs anywhere; ``triton`` is the kernel for a GPU;
``native`` are C kernels, of attention over a work list alone. ``cpu`` is what ``auto`` takes on a
CPU: the path that an operator has for it where the reference is slow, else the reference."""

import os
from typing import Literal

from torch import Tensor

from looseleaf.errors import InvalidOption

Implementation = Literal["auto", "reference", "cpu", "native", "triton"]


def choose(
    asked: Implementation,
    tensor: Tensor,
    *,
    cpu: Implementation = "reference",
    native: bool = False,
) -> str:
    """The implementation to run: ``asked``, or for ``auto`` Triton on a GPU and ``cpu`` elsewhere;
    an operator without a path of its own for CPUs has its reference there.

    Raises InvalidOption for a name that is not an implementation, for ``native`` where there is
    none, and for one that can't read tensors where they are.
    """
    if asked == "auto":
        return "triton" if tensor.is_cuda else cpu
    if asked not in ("reference", "cpu", "native", "triton"):
        raise InvalidOption(
            f"unknown implementation {asked!r}: use auto, reference, cpu, native or triton"
        )
    if asked == "native" and not native:
        raise InvalidOption("this operator has no C kernel: use implementation='cpu'")
    if asked in ("cpu", "native") and tensor.is_cuda:
        raise InvalidOption(
            f"implementation={asked!r} reads tensors on the CPU, and these are on a GPU: use "
            "implementation='triton' or 'reference'"
        )
    if asked == "triton" and tensor.device.type == "cpu" and not _is_interpreted():
        raise InvalidOption(
            "Triton's kernels read tensors on a GPU, and these are on the CPU: move them, or use "
            "implementation='cpu' (TRITON_INTERPRET=1, set before triton is imported, runs kernels "
            "on a CPU, for tests)"
        )
    return cpu if asked == "cpu" else asked


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")

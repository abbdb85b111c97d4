"""Selects the implementation of an operator from the caller's name or the device.

``reference`` follows the equation and runs on any device. ``triton`` is the GPU kernel. ``native``
is C code, which some operators have. ``cpu`` is the default on a CPU: the operator's CPU
path, or its reference."""

import os
from typing import Literal

from torch import Tensor

from looseleaf.errors import InvalidOption

Implementation = Literal["auto", "reference", "cpu", "native", "triton"]


def choose(
    implementation: Implementation,
    tensor: Tensor,
    *,
    cpu: Implementation = "reference",
    native: bool = False,
) -> str:
    """The implementation to run: ``implementation``, or for ``auto`` the default of the device.

    ``auto`` means ``triton`` on a GPU, and the implementation in the argument ``cpu`` elsewhere.
    Raises InvalidOption for an unknown name, for ``native`` without ``native=True``, and for an
    implementation that cannot read the tensor's device."""
    if implementation == "auto":
        return "triton" if tensor.is_cuda else cpu
    if implementation not in ("reference", "cpu", "native", "triton"):
        raise InvalidOption(
            f"unknown implementation {implementation!r}: use auto, reference, cpu, native or triton"
        )
    if implementation == "native" and not native:
        raise InvalidOption("this operator has no C kernel: use implementation='cpu'")
    if implementation in ("cpu", "native") and tensor.is_cuda:
        raise InvalidOption(
            f"implementation={implementation!r} reads tensors on the CPU, and these are on a GPU: "
            "use implementation='triton' or 'reference'"
        )
    if implementation == "triton" and tensor.device.type == "cpu" and not _is_interpreted():
        raise InvalidOption(
            "Triton's kernels read tensors on a GPU, and these are on the CPU: move them, or use "
            "implementation='cpu' (for tests, TRITON_INTERPRET=1 before the import of triton runs "
            "kernels on a CPU)"
        )
    return cpu if implementation == "cpu" else implementation


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")

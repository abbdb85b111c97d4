"""Which implementation of an operator runs: the one asked for, or the device's own."""

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
    """The implementation to run: ``asked``, or for ``auto`` Triton on a GPU and ``cpu`` elsewhere.

    Raises InvalidOption for a name that is not an implementation, and for ``native`` where there is
    none.
    """
    if asked == "auto":
        return "triton" if tensor.is_cuda else cpu
    if asked not in ("reference", "cpu", "native", "triton"):
        raise InvalidOption(
            f"unknown implementation {asked!r}: use auto, reference, cpu, native or triton"
        )
    if asked == "native" and not native:
        raise InvalidOption("this operator has no C kernel: use implementation='cpu'")
    return asked

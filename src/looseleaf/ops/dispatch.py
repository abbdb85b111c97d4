"""Which implementation of an operator runs: the one asked for, or the device's own."""

from typing import Literal

from torch import Tensor

from looseleaf.errors import InvalidOption

Implementation = Literal["auto", "reference", "cpu", "triton"]


def choose(asked: Implementation, tensor: Tensor, *, cpu: Implementation = "reference") -> str:
    """The implementation to run: ``asked``, or for ``auto`` Triton on a GPU and ``cpu`` elsewhere.

    Raises InvalidOption for a name that is not an implementation.
    """
    if asked == "auto":
        return "triton" if tensor.is_cuda else cpu
    if asked not in ("reference", "cpu", "triton"):
        raise InvalidOption(f"unknown implementation {asked!r}: use auto, reference, cpu or triton")
    return asked

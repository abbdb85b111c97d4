"""Copies from pinned memory to the same stretch of many layers, in one call of the CUDA runtime.

A run of pages lies in every layer of the pool, at the same distance from one to the next: rows of a
matrix for the runtime, and one copy of many for PyTorch. The call is made with the interpreter's
lock held: it takes microseconds, and to get the lock back from a thread that launches a step takes
a hundred times as long."""

import ctypes
import logging
from functools import cache
from typing import Any, NamedTuple

import torch

_log = logging.getLogger(__name__)
_TO_DEVICE = 1
# the longest distance that a copy takes from one row to the next
MOST_PITCH = (1 << 31) - 1


class Rows(NamedTuple):
    """Rows of bytes: the first begins at ``address``, each next one ``pitch`` bytes behind it."""

    address: int
    pitch: int


@cache
def runtime_copy() -> Any:
    """The call of the runtime that PyTorch has loaded; None where it is not to be found."""
    major = (torch.version.cuda or "").split(".")[0]
    try:
        call = ctypes.PyDLL(f"libcudart.so.{major}").cudaMemcpy2DAsync
    except (OSError, AttributeError) as error:
        _log.warning("documents come to the GPU in more copies, and more slowly: %s", error)
        return None
    size, place = ctypes.c_size_t, ctypes.c_void_p
    call.argtypes = [place, size, place, size, size, size, ctypes.c_int, place]
    return call


def copy_to_device(target: Rows, source: Rows, width: int, height: int, stream: int) -> None:
    """Ask for a copy of ``height`` rows of ``width`` bytes on a ``stream`` (its handle).

    Raises RuntimeError if the runtime refuses."""
    error = runtime_copy()(*target, *source, width, height, _TO_DEVICE, stream)
    if error:
        raise RuntimeError(f"cudaMemcpy2DAsync failed with error {error}")

"""Copies one page run of many layers from pinned memory, in one call of the CUDA runtime.

A run of pages has the same offset in every layer, so its layers are the rows of a pitched copy;
PyTorch would need one copy per row. The call holds the interpreter lock: it takes microseconds,
while reacquiring the lock from a thread that launches a step takes a hundred times as long."""

import ctypes
import logging
from functools import cache
from typing import Any, NamedTuple

import torch

_log = logging.getLogger(__name__)
_TO_DEVICE = 1
# the largest pitch of the runtime
MOST_PITCH = (1 << 31) - 1


class Rows(NamedTuple):
    """Rows of bytes: address of the first, and distance in bytes from each to the next."""

    address: int
    pitch: int


@cache
def runtime_copy() -> Any:
    """``cudaMemcpy2DAsync`` of PyTorch's CUDA runtime; None if it can't be loaded."""
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
    """Enqueues a copy of ``height`` rows of ``width`` bytes on a ``stream`` handle.

    Raises RuntimeError if the runtime refuses."""
    error = runtime_copy()(*target, *source, width, height, _TO_DEVICE, stream)
    if error:
        raise RuntimeError(f"cudaMemcpy2DAsync failed with error {error}")

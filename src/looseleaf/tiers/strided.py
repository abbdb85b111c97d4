"""Copies between memory of the host and the same stretch of many layers, in one call.

A run of pages lies in every layer of the pool, at the same distance from one to the next: rows of a
matrix for the CUDA runtime, and one copy of many for PyTorch."""

import ctypes
import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

_log = logging.getLogger(__name__)
_TO_DEVICE = 1
# the longest distance that a copy takes from one row to the next
MOST_PITCH = (1 << 31) - 1


@dataclass(frozen=True)
class Rows:
    """Rows of bytes: the first begins at ``address``, each next one ``pitch`` bytes behind it."""

    address: int
    pitch: int


@cache
def _runtime() -> Any:
    """The call of the runtime that PyTorch has loaded; None where it is not to be found."""
    major = (torch.version.cuda or "").split(".")[0]
    try:
        call = ctypes.CDLL(f"libcudart.so.{major}").cudaMemcpy2DAsync
    except (OSError, AttributeError) as error:
        _log.warning("documents come to the GPU in more copies, and more slowly: %s", error)
        return None
    size, place = ctypes.c_size_t, ctypes.c_void_p
    call.argtypes = [place, size, place, size, size, size, ctypes.c_int, place]
    return call


def copy_to_device(
    target: Rows, source: Rows, width: int, height: int, stream: torch.cuda.Stream
) -> bool:
    """Ask for a copy of ``height`` rows on ``stream``, from pinned memory; False if this can't be
    done in one call.

    Raises RuntimeError if the runtime refuses."""
    call = _runtime()
    if call is None or max(target.pitch, source.pitch) > MOST_PITCH:
        return False
    error = call(
        target.address, target.pitch, source.address, source.pitch, width, height, _TO_DEVICE,
        stream.cuda_stream,
    )  # fmt: skip
    if error:
        raise RuntimeError(f"cudaMemcpy2DAsync failed with error {error}")
    return True

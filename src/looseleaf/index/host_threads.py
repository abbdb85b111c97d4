"""A pool of C threads for the host's part of a step, started by Python or by a CUDA stream."""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import resources
from typing import NamedTuple

from torch import Tensor

from looseleaf.errors import NativeUnavailable
from looseleaf.ops.native.native_build import load_library

# threads poll this long before they sleep: about the time of the rest of a layer on a GPU
_PATIENCE_NS = 400_000


class Part(ctypes.Structure):
    """``total`` calls of the C function ``unit`` with one ``task`` and the numbers of the calls."""

    _fields_ = (
        ("unit", ctypes.c_void_p),
        ("task", ctypes.c_void_p),
        ("total", ctypes.c_int64),
    )


class ThreadsLayer(ctypes.Structure):
    """The work of one layer: sets ``num_lse`` numbers to -inf, then runs the parts in order.

    ``nanoseconds`` accumulates the duration of all runs."""

    _fields_ = (
        ("threads", ctypes.c_void_p),
        ("parts", ctypes.POINTER(Part)),
        ("num_parts", ctypes.c_int64),
        ("lse", ctypes.c_void_p),
        ("num_lse", ctypes.c_int64),
        ("nanoseconds", ctypes.c_int64),
    )


class StreamSignal(NamedTuple):
    """Addresses of two words shared with a device.

    The device writes the address of a `ThreadsLayer` to ``request`` (64 bits) once its queries are
    copied. The threads write 1 to ``reply`` (32 bits) once its states are computed."""

    request: int
    reply: int


class HostThreads:
    """``threads`` threads, the caller's included; they end with this object.

    Raises NativeUnavailable without a C compiler."""

    def __init__(self, threads: int) -> None:
        source = (
            resources.files("looseleaf.index")
            .joinpath("host_threads.c")
            .read_text(encoding="utf-8")
        )
        library = load_library(source, ())
        library.looseleaf_begin_threads.restype = ctypes.c_void_p
        address = library.looseleaf_begin_threads(
            ctypes.c_int64(threads), ctypes.c_int64(_PATIENCE_NS)
        )
        if address is None:
            raise NativeUnavailable("no memory for threads: end other programs")
        self.pointer = ctypes.c_void_p(address)
        self._library = library
        self._end = weakref.finalize(self, library.looseleaf_end_threads, self.pointer)

    def listen(self, words: Tensor, synchronize: Callable[[], None]) -> StreamSignal:
        """Start a thread that runs every layer requested through the returned signal.

        ``words`` is its memory, int64 ``[16]``, zeroed and visible to device and host.
        ``synchronize`` waits for the device before the threads end, because a device that waits for
        an ended thread hangs. Raises NativeUnavailable if no thread can be started."""
        address = words.data_ptr()
        if not self._library.looseleaf_listen(self.pointer, ctypes.c_void_p(address)):
            raise NativeUnavailable("no thread for the requests of a GPU: end other programs")
        # keeps the memory alive as long as the thread
        self._end.detach()
        self._end = weakref.finalize(self, _end, self._library, self.pointer, words, synchronize)
        return StreamSignal(address, address + 64)

    def layers(self, count: int, lse: int, num_lse: int) -> "ctypes.Array[ThreadsLayer]":
        """``count`` layers without parts, over states with their lse at address ``lse``."""
        layers = (ThreadsLayer * count)()
        for layer in layers:
            layer.threads, layer.lse, layer.num_lse = self.pointer.value, lse, num_lse
        return layers

    def run(self, layer: ThreadsLayer) -> None:
        """Run a layer on all threads, without Python's lock."""
        self._library.looseleaf_run_layer(ctypes.byref(layer))


def _end(
    library: ctypes.CDLL,
    threads: ctypes.c_void_p,
    words: Tensor,
    synchronize: Callable[[], None],
) -> None:
    # a failed device sends no requests
    with suppress(RuntimeError):
        synchronize()
    library.looseleaf_end_threads(threads)


def set_parts(layer: ThreadsLayer, parts: Sequence[Part]) -> "ctypes.Array[Part]":
    """Set the parts of a layer; the result must live as long as the layer may run."""
    array = (Part * len(parts))(*parts)
    layer.parts, layer.num_parts = ctypes.cast(array, ctypes.POINTER(Part)), len(parts)
    return array

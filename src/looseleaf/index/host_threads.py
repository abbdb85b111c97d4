"""Threads that wait in C for the host's part of a step, called by Python or by a CUDA stream."""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import resources
from typing import NamedTuple

from torch import Tensor

from looseleaf.errors import NativeUnavailable
from looseleaf.ops.native.native_build import load_library

# a GPU needs about so long for the rest of a layer
_PATIENCE_NS = 400_000


class Part(ctypes.Structure):
    """Some units of a C function over one task."""

    _fields_ = (
        ("unit", ctypes.c_void_p),
        ("task", ctypes.c_void_p),
        ("total", ctypes.c_int64),
    )


class CrewLayer(ctypes.Structure):
    """What is done in one layer: ``num_lse`` numbers become -inf, then the parts run.

    ``nanoseconds`` grows by what calls took."""

    _fields_ = (
        ("crew", ctypes.c_void_p),
        ("parts", ctypes.POINTER(Part)),
        ("num_parts", ctypes.c_int64),
        ("lse", ctypes.c_void_p),
        ("num_lse", ctypes.c_int64),
        ("nanoseconds", ctypes.c_int64),
    )


class Bell(NamedTuple):
    """Addresses: where a device writes the address of a `CrewLayer` whose queries are there, 64
    bits, and where 1 stands, 32 bits, once its states are."""

    rung: int
    done: int


class Crew:
    """``threads`` threads, the caller's among them; they end with this object.

    Raises NativeUnavailable without a C compiler."""

    def __init__(self, threads: int) -> None:
        source = (
            resources.files("looseleaf.index")
            .joinpath("host_threads.c")
            .read_text(encoding="utf-8")
        )
        library = load_library(source, ())
        library.looseleaf_begin_crew.restype = ctypes.c_void_p
        begun = library.looseleaf_begin_crew(ctypes.c_int64(threads), ctypes.c_int64(_PATIENCE_NS))
        if begun is None:
            raise NativeUnavailable("no memory for threads: end other programs")
        self.pointer = ctypes.c_void_p(begun)
        self._library = library
        self._end = weakref.finalize(self, library.looseleaf_end_crew, self.pointer)

    def listen(self, bell: Tensor, settle: Callable[[], None]) -> "Bell":
        """Run every layer whose address is written to the `Bell` in ``bell``, int64 ``[16]``, all
        zeros, which device and host see; one more thread than before calls. ``settle`` waits for
        the device, before the threads end: one that waits for them would wait forever.

        Raises NativeUnavailable if the system gives no thread."""
        at = bell.data_ptr()
        if not self._library.looseleaf_listen(self.pointer, ctypes.c_void_p(at)):
            raise NativeUnavailable("no thread for what a GPU asks: end other programs")
        # the memory must be there as long as the thread
        self._end.detach()
        self._end = weakref.finalize(self, _end, self._library, self.pointer, bell, settle)
        return Bell(at, at + 64)

    def layers(self, count: int, lse: int, num_lse: int) -> "ctypes.Array[CrewLayer]":
        """``count`` layers without parts, over states whose lse stands at address ``lse``."""
        made = (CrewLayer * count)()
        for layer in made:
            layer.crew, layer.lse, layer.num_lse = self.pointer.value, lse, num_lse
        return made

    def run(self, layer: CrewLayer) -> None:
        """Run a layer on this thread and the others, outside of Python's lock."""
        self._library.looseleaf_run_layer(ctypes.byref(layer))


def _end(
    library: ctypes.CDLL, crew: ctypes.c_void_p, bell: Tensor, settle: Callable[[], None]
) -> None:
    # a device that failed asks for nothing any more
    with suppress(RuntimeError):
        settle()
    library.looseleaf_end_crew(crew)


def set_parts(layer: CrewLayer, parts: Sequence[Part]) -> "ctypes.Array[Part]":
    """Give a layer its parts; the result must live as long as the layer may run."""
    made = (Part * len(parts))(*parts)
    layer.parts, layer.num_parts = ctypes.cast(made, ctypes.POINTER(Part)), len(parts)
    return made

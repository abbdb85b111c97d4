"""Threads that wait in C for the host's part of a step, called by Python or by a CUDA stream."""

import ctypes
import weakref
from collections.abc import Sequence
from importlib import resources

from looseleaf.errors import NativeUnavailable
from looseleaf.ops.native_build import load_library

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


class Crew:
    """``threads`` threads, the caller's among them; they end with this object.

    Raises NativeUnavailable without a C compiler."""

    def __init__(self, threads: int) -> None:
        source = resources.files("looseleaf.index").joinpath("crew.c").read_text()
        library = load_library(source, ())
        library.looseleaf_begin_crew.restype = ctypes.c_void_p
        begun = library.looseleaf_begin_crew(ctypes.c_int64(threads), ctypes.c_int64(_PATIENCE_NS))
        if begun is None:
            raise NativeUnavailable("no memory for threads: end other programs")
        self.pointer = ctypes.c_void_p(begun)
        self._library = library
        weakref.finalize(self, library.looseleaf_end_crew, self.pointer)

    @property
    def function(self) -> int:
        """The address of the C function that runs the `CrewLayer` at its argument."""
        address = ctypes.cast(self._library.looseleaf_run_layer, ctypes.c_void_p).value
        assert address is not None
        return address

    def layers(self, count: int, lse: int, num_lse: int) -> "ctypes.Array[CrewLayer]":
        """``count`` layers without parts, over states whose lse stands at address ``lse``."""
        made = (CrewLayer * count)()
        for layer in made:
            layer.crew, layer.lse, layer.num_lse = self.pointer.value, lse, num_lse
        return made

    def run(self, layer: CrewLayer) -> None:
        """Run a layer on this thread and the others, outside of Python's lock."""
        self._library.looseleaf_run_layer(ctypes.byref(layer))


def set_parts(layer: CrewLayer, parts: Sequence[Part]) -> "ctypes.Array[Part]":
    """Give a layer its parts; the result must live as long as the layer may run."""
    made = (Part * len(parts))(*parts)
    layer.parts, layer.num_parts = ctypes.cast(made, ctypes.POINTER(Part)), len(parts)
    return made

"""The C library of the indexes, compiled once per dim and dtype of keys, and its structs."""

import ctypes
import math

import torch

from looseleaf.errors import NativeUnavailable
from looseleaf.index.keys import KeyVectors
from looseleaf.ops.native.c_compiler import vector_lanes
from looseleaf.ops.native.native_build import load_library, read_source

# dtype numbers in C, of keys and (without int8) of queries
KEY_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
# files included between `vectors.h` and the file itself
_WALK = ("codes.h", "index.h", "walk.h")
_INCLUDES = {"search.c": _WALK, "windows.c": (*_WALK, "search.c", "reads.c")}


class KeysPointer(ctypes.Structure):
    """The C struct of keys. The caller keeps the keys alive."""

    _fields_ = (
        ("vectors", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("exact", ctypes.c_void_p),
        ("exact_stride", ctypes.c_int64),
    )

    @classmethod
    def of(cls, keys: KeyVectors) -> "KeysPointer":
        """Pointers into ``keys`` and their exact originals."""
        pointer = cls(
            keys.vectors.data_ptr(),
            None if keys.scales is None else keys.scales.data_ptr(),
            len(keys),
            keys.vectors.stride(0),
        )
        if (exact := keys.exact) is not None:
            pointer.exact, pointer.exact_stride = exact.vectors.data_ptr(), exact.vectors.stride(0)
        return pointer


def load_index_library(name: str, keys: KeyVectors) -> ctypes.CDLL:
    """The C file ``name`` of this folder, compiled for the dim and the dtypes of ``keys``.

    Raises NativeUnavailable if it can't be compiled."""
    for dtype in (keys.vectors.dtype, keys.source.vectors.dtype):
        if dtype not in KEY_TYPES:
            raise NativeUnavailable(f"no C search over keys of {dtype}")
    source = read_source("looseleaf.index", "vectors.h", *_INCLUDES.get(name, ()), name)
    dim = keys.head_dim
    defines = {
        "DIM": dim,
        "KEY_TYPE": KEY_TYPES[keys.vectors.dtype],
        "VALUE_TYPE": KEY_TYPES[keys.source.vectors.dtype],
        "LANES": math.gcd(dim, vector_lanes()),
    }
    return load_library(source, tuple(defines.items()))


def try_native(keys: KeyVectors, name: str = "search.c") -> ctypes.CDLL | None:
    """The library, or None without a C compiler; the fallback gives equal results, slower."""
    try:
        return load_index_library(name, keys)
    except NativeUnavailable:
        return None

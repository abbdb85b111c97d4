"""Reads of segments by decoding rows as C does them: tables of places, reads, windows and tasks."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from looseleaf.index.base import KVIndex
from looseleaf.index.ivf import IvfIndex
from looseleaf.index.keys import KeyVectors
from looseleaf.index.native import KeysPointer, load_index_library
from looseleaf.index.searching import IndexPointer

_PLACE = np.dtype(
    [
        ("index", np.uintp),
        ("values", np.uintp),
        ("always_keys", np.uintp),
        ("always_values", np.uintp),
        ("effort", np.int64),
        ("top", np.int64),
        ("value_means", np.uintp),
        ("cluster_of", np.uintp),
        ("estimated", np.int64),
    ],
    align=True,
)
READ = np.dtype(
    [
        ("row", np.int64),
        ("place", np.int64),
        ("want", np.int64),
        ("heads", np.uintp),
        ("found", np.uintp),
    ],
    align=True,
)
"""A row's read of a segment: ``place`` is where the row stands in its frame, ``want`` how many keys
the index finds, ``heads`` the address of `ReadPlaces.address`, ``found`` that of a `FOUND`, for a
row with a window."""
WALKED = np.dtype([("keys", np.uintp), ("count", np.int64)], align=True)
"""Room for what a walk leaves for who reads."""
FOUND = np.dtype(
    [("ids", np.uintp), ("steps", np.uintp), ("counts", np.uintp), ("room", np.int64)], align=True
)
"""What the searches of a window found of a segment: addresses of int32 ``[heads, room]`` twice and
int64 ``[heads]``."""
WINDOW = np.dtype(
    [
        ("position", np.int64),
        ("count", np.int64),
        ("size", np.int64),
        ("rows", np.uintp),
        ("out", np.uintp),
        ("lse", np.uintp),
        ("booked", np.uintp),
        ("tallies", np.uintp),
    ],
    align=True,
)
"""The rows of an output, of which the newest stands at ``position``, and addresses: which ``rows``
of the step the ``count`` of them are, newest first, int64; fp32 ``out`` ``[size, heads, dim]`` and
``lse``, what they keep; int64 ``booked`` ``[heads]`` and ``tallies`` ``[size]``."""


class ReadTask(ctypes.Structure):
    """All reads of a layer by keys of one dtype. ``counts`` grow: keys before the reads, keys read,
    vectors compared; keys wanted and found of the pair ``sampled`` of a reading row and a head.
    Rows on their own are read in two units for each of the ``pairs``, and need `WALKED` ``[reads,
    heads]`` and zeros, int32 ``ready`` ``[pairs]``."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("q_type", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("half", ctypes.c_int64),
        ("interleaved", ctypes.c_int64),
        ("reads", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("sampled", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("counts", ctypes.c_int64 * 5),
        ("windows", ctypes.c_void_p),
        ("pairs", ctypes.c_int64),
        ("walked", ctypes.c_void_p),
        ("ready", ctypes.c_void_p),
        ("num_ready", ctypes.c_int64),
    )


@dataclass(frozen=True)
class HeadKeys:
    """What one query head reads of a layer of a segment: by ``index``, which has ``values``, and
    always. All that is not compared only is of one dtype."""

    index: KVIndex | None
    values: KeyVectors | None
    always: tuple[KeyVectors, KeyVectors]


class ReadPlaces:
    """The heads of a layer of a segment as C reads them; keeps alive what it points to.

    Raises NativeUnavailable if C can't be compiled for their dim and dtype."""

    def __init__(self, heads: Sequence[HeadKeys]) -> None:
        index = heads[0].index
        library = load_index_library("windows.c", index.keys if index else heads[0].always[0])
        # for a row on its own, and for the rows of a window
        self.unit = _address(library.looseleaf_read)
        self.window_unit = _address(library.looseleaf_read_window)
        self._heads = list(heads)
        self._kept: dict[int, KeysPointer | IndexPointer] = {}
        self._table = np.zeros(len(heads), dtype=_PLACE)
        for n, head in enumerate(heads):
            place = self._table[n]
            place["always_keys"], place["always_values"] = map(self._keys, head.always)
            if head.index is not None and head.values is not None:
                place["values"] = self._keys(head.values)
                place["index"] = self._keep(head.index, IndexPointer.of(head.index))
                place["effort"], place["top"] = head.index.effort, head.index.config.top
            if isinstance(head.index, IvfIndex) and (values := head.index.estimate) is not None:
                place["value_means"] = values.means.data_ptr()
                place["cluster_of"] = values.cluster_of.data_ptr()
                place["estimated"] = len(values.means)

    @property
    def address(self) -> int:
        return int(self._table.ctypes.data)

    def _keys(self, keys: KeyVectors) -> int:
        return self._keep(keys, KeysPointer.of(keys))

    def _keep(self, owner: object, pointer: KeysPointer | IndexPointer) -> int:
        return ctypes.addressof(self._kept.setdefault(id(owner), pointer))


def _address(function: object) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None
    return address

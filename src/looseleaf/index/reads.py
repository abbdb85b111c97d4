"""The C structs of decoding rows' reads of segments: head tables, reads, windows and tasks."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from looseleaf.index.base import KVIndex
from looseleaf.index.ivf import IvfIndex
from looseleaf.index.keys import KeyVectors
from looseleaf.index.native import KeysPointer, load_index_library
from looseleaf.index.searching import IndexPointer

_HEAD = np.dtype(
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
        ("position", np.int64),
        ("want", np.int64),
        ("heads", np.uintp),
        ("found", np.uintp),
    ],
    align=True,
)
"""A row's read of a segment: the row's ``position`` in the frame, and the number ``want`` of hits.
``heads`` is `HeadTable.address`; ``found`` is the address of a `FOUND` for rows with a window."""
WALKED = np.dtype([("keys", np.uintp), ("count", np.int64)], align=True)
"""Result of a graph walk, passed to the read of its keys."""
FOUND = np.dtype(
    [("ids", np.uintp), ("steps", np.uintp), ("counts", np.uintp), ("room", np.int64)], align=True
)
"""Hits of a window's searches in a segment: addresses of int32 ``ids`` and ``steps`` ``[heads,
room]`` and int64 ``counts`` ``[heads]``."""
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
"""The window of an output: the ``position`` of its newest row, the ``count`` of its rows, and
addresses. ``rows``, int64, are row indices in the step, newest first. ``out`` fp32 ``[size, heads,
dim]`` and ``lse`` accumulate states; ``booked`` is int64 ``[heads]``, ``tallies`` ``[size]``."""


class ReadTask(ctypes.Structure):
    """All reads of a layer over keys of one dtype.

    ``counts`` accumulate: visible keys, keys read, vectors compared, and exact and returned keys of
    the (row, head) pair ``sampled``. Rows without a window take two units for each of the
    ``pairs``; they need `WALKED` ``[reads, heads]`` and zeroed int32 ``ready`` ``[pairs]``."""

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
    """Keys of a segment for one query head of a layer.

    ``index`` searches keys with ``values``; ``always`` are keys and values of the other tokens.
    Stored keys and values have one dtype."""

    index: KVIndex | None
    values: KeyVectors | None
    always: tuple[KeyVectors, KeyVectors]


class HeadTable:
    """The C table of a segment's query heads in one layer; keeps its pointees alive.

    Raises NativeUnavailable if C can't be compiled for their dim and dtype."""

    def __init__(self, heads: Sequence[HeadKeys]) -> None:
        index = heads[0].index
        library = load_index_library("windows.c", index.keys if index else heads[0].always[0])
        # C functions for a single row, and for the rows of a window
        self.unit = _address(library.looseleaf_read)
        self.window_unit = _address(library.looseleaf_read_window)
        self._heads = list(heads)
        self._pointers: dict[int, KeysPointer | IndexPointer] = {}
        self._table = np.zeros(len(heads), dtype=_HEAD)
        for n, head in enumerate(heads):
            entry = self._table[n]
            entry["always_keys"], entry["always_values"] = map(self._keys, head.always)
            if head.index is not None and head.values is not None:
                entry["values"] = self._keys(head.values)
                entry["index"] = self._keep(head.index, IndexPointer.of(head.index))
                entry["effort"], entry["top"] = head.index.effort, head.index.config.top
            if isinstance(head.index, IvfIndex) and (values := head.index.estimate) is not None:
                entry["value_means"] = values.means.data_ptr()
                entry["cluster_of"] = values.cluster_of.data_ptr()
                entry["estimated"] = len(values.means)

    @property
    def address(self) -> int:
        return int(self._table.ctypes.data)

    def _keys(self, keys: KeyVectors) -> int:
        return self._keep(keys, KeysPointer.of(keys))

    def _keep(self, owner: object, pointer: KeysPointer | IndexPointer) -> int:
        return ctypes.addressof(self._pointers.setdefault(id(owner), pointer))


def _address(function: object) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None
    return address

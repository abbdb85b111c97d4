"""Revision state of an output over host-resident segments: row states and recently read keys.

A row keeps its state over all segments, and continues from it. The keys that rows have read are the
results of the last searches, each with the position of the row that returned it last. For each
layer and query head the list is as long as the searches of a window: a window of four with 100 keys
a search keeps at most 300 keys. A bit a key, like the pages' byte, would grow with the segment. C
code writes the arrays (`looseleaf.index.reads`)."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from looseleaf.index.reads import FOUND, WINDOW

_Ints = npt.NDArray[np.int64]


class WindowShape(NamedTuple):
    """Sizes of a model whose outputs have windows."""

    num_layers: int
    num_qo_heads: int
    head_dim: int


class _Kept(NamedTuple):
    """``out`` is fp32 ``[layers, size, qo_heads, head_dim]``, ``lse`` lacks the last axis,
    ``booked`` is int64 ``[layers, qo_heads]``."""

    out: npt.NDArray[np.float32]
    lse: npt.NDArray[np.float32]
    booked: _Ints


class _Found(NamedTuple):
    """``ids`` and ``steps`` are int32 ``[layers, qo_heads, room]``, ``counts`` int64 ``[layers,
    qo_heads]``; ``records`` has their addresses by layer."""

    ids: npt.NDArray[np.int32]
    steps: npt.NDArray[np.int32]
    counts: _Ints
    records: np.ndarray


class HostedWindow:
    """The rows of one output, at most ``size`` of them, from step to step.

    The row at position ``p`` uses index ``p % size``. ``tallies[n]`` counts first reads of keys by
    rows ``n`` steps old, over layers, segments and query heads. ``tallies[0]`` includes the keys
    that rows always read."""

    def __init__(self, shape: WindowShape, size: int, tallies: _Ints | None = None) -> None:
        assert size > 1, "a window has at least two rows"
        self.shape, self.size = shape, size
        self.tallies = np.zeros(size, dtype=np.int64) if tallies is None else tallies
        # by address of the C function that writes them; by the number of a row's read
        self._kept: dict[int, _Kept] = {}
        self._found: dict[int, _Found] = {}

    def record(self, layer: int, unit: int, rows: _Ints) -> np.ndarray:
        """The `WINDOW` of a step with these ``rows``, without its position."""
        layers, heads, dim = self.shape
        if unit not in self._kept:
            states = layers, self.size, heads
            self._kept[unit] = _Kept(
                np.zeros((*states, dim), dtype=np.float32),
                np.full(states, -np.inf, dtype=np.float32),
                np.full((layers, heads), -1, dtype=np.int64),
            )
        out, lse, booked = self._kept[unit]
        record = np.zeros((), dtype=WINDOW)
        record["count"], record["size"], record["rows"] = len(rows), self.size, rows.ctypes.data
        record["out"], record["lse"] = out[layer].ctypes.data, lse[layer].ctypes.data
        record["booked"], record["tallies"] = booked[layer].ctypes.data, self.tallies.ctypes.data
        return record

    def found(self, number: int, layer: int, want: int, num_keys: int) -> int:
        """Address of the `FOUND` of a layer, for the read ``number`` of every row, with ``want``
        keys of an index over ``num_keys``."""
        if number not in self._found:
            layers, heads, _ = self.shape
            # the oldest of ``size`` steps has left the window of the next newest row
            room = min((self.size - 1) * want, num_keys)
            ids = np.zeros((layers, heads, room), dtype=np.int32)
            steps, counts = np.zeros_like(ids), np.zeros((layers, heads), dtype=np.int64)
            records = np.zeros(layers, dtype=FOUND)
            for index in range(layers):
                records[index]["ids"] = ids[index].ctypes.data
                records[index]["steps"] = steps[index].ctypes.data
                records[index]["counts"], records[index]["room"] = counts[index].ctypes.data, room
            self._found[number] = _Found(ids, steps, counts, records)
        return int(self._found[number].records[layer : layer + 1].ctypes.data)


class WindowRow(NamedTuple):
    """A row of a ``window``, ``age`` steps older than the newest."""

    window: HostedWindow
    age: int

"""What an output keeps of the rows in its window over hosted segments: states, and keys found.

A row keeps its state over what it has read of all segments, and goes on from there. What rows have
read is told by the keys that the last searches found, with the position of the row that found each
last: a list as long as the searches of a window, for each layer and query head. A bit a key, as
pages have a byte, would be as long as the segment: 16 KB a head at 131,072 tokens, and a window of
four with 100 keys a search keeps at most 300 keys, 2.4 KB. The arrays are written in C
(`looseleaf.index.reads`)."""

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
    """``out`` fp32 ``[layers, size, qo_heads, head_dim]``, ``lse`` without the last, ``booked``
    int64 ``[layers, qo_heads]``."""

    out: npt.NDArray[np.float32]
    lse: npt.NDArray[np.float32]
    booked: _Ints


class _Found(NamedTuple):
    """``ids`` and ``steps`` int32 ``[layers, qo_heads, room]``, ``counts`` int64 ``[layers,
    qo_heads]``, and where C finds those of a layer."""

    ids: npt.NDArray[np.int32]
    steps: npt.NDArray[np.int32]
    counts: _Ints
    records: np.ndarray


class HostedWindow:
    """The rows of one output, at most ``size`` of them, from step to step.

    The row at position ``p`` has place ``p % size``. ``tallies[n]`` counts keys that rows read for
    the first time ``n`` steps behind their own, over layers, segments and query heads; at their own
    step those that are always read among them."""

    def __init__(self, shape: WindowShape, size: int, tallies: _Ints | None = None) -> None:
        assert size > 1, "a window of one row keeps nothing"
        self.shape, self.size = shape, size
        self.tallies = np.zeros(size, dtype=np.int64) if tallies is None else tallies
        # by the C function that writes them; by the number of a row's read
        self._kept: dict[int, _Kept] = {}
        self._found: dict[int, _Found] = {}

    def record(self, layer: int, unit: int, rows: _Ints) -> np.ndarray:
        """The `WINDOW` of a step with these ``rows``, but for its position."""
        layers, heads, dim = self.shape
        if unit not in self._kept:
            states = layers, self.size, heads
            self._kept[unit] = _Kept(
                np.zeros((*states, dim), dtype=np.float32),
                np.full(states, -np.inf, dtype=np.float32),
                np.full((layers, heads), -1, dtype=np.int64),
            )
        out, lse, booked = self._kept[unit]
        made = np.zeros((), dtype=WINDOW)
        made["count"], made["size"], made["rows"] = len(rows), self.size, rows.ctypes.data
        made["out"], made["lse"] = out[layer].ctypes.data, lse[layer].ctypes.data
        made["booked"], made["tallies"] = booked[layer].ctypes.data, self.tallies.ctypes.data
        return made

    def found(self, number: int, layer: int, want: int, num_keys: int) -> int:
        """Where the `FOUND` of a layer lies, of the read ``number`` of every row: ``want`` keys of
        an index over ``num_keys``."""
        if number not in self._found:
            layers, heads, _ = self.shape
            # the newest row of the next step asks about none of the oldest of so many steps
            room = min((self.size - 1) * want, num_keys)
            ids = np.zeros((layers, heads, room), dtype=np.int32)
            steps, counts = np.zeros_like(ids), np.zeros((layers, heads), dtype=np.int64)
            records = np.zeros(layers, dtype=FOUND)
            for at in range(layers):
                records[at]["ids"] = ids[at].ctypes.data
                records[at]["steps"] = steps[at].ctypes.data
                records[at]["counts"], records[at]["room"] = counts[at].ctypes.data, room
            self._found[number] = _Found(ids, steps, counts, records)
        return int(self._found[number].records[layer : layer + 1].ctypes.data)


class WindowRow(NamedTuple):
    """A row of a ``window``, ``age`` steps older than the newest."""

    window: HostedWindow
    age: int

"""The schedule of copies from host memory to a GPU: which layers of which documents go together.

Each copy has a fixed launch cost, so copies are few and large. The first layers of all documents
go first, because a step begins with them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class BatchLimits:
    """Bytes per batch of copies, and how many batches may be in flight.

    ``first`` and ``second`` bound the layers that a step needs first, of all documents together.
    ``immediate`` bytes are submitted without waiting for the device. Later batches hold up to
    ``per_document`` bytes of one document's layers, or all documents' where that is None.
    ``combined`` bounds a later batch."""

    first: int
    second: int
    immediate: int
    per_document: int | None
    combined: int
    in_flight: int


_PLAIN = BatchLimits(26 << 20, 52 << 20, 64 << 20, 6 << 20, 18 << 20, 2)
# a kernel follows each packed copy, and its launch costs as much as six copies
_PACKED = BatchLimits(30 << 20, 40 << 20, 60 << 20, None, 48 << 20, 1)


class CopyBatch(NamedTuple):
    """Layers and documents (both by number) that are copied together."""

    layers: range
    documents: range


@dataclass(frozen=True)
class CopySchedule:
    """Batches in the order in which a step needs them."""

    limits: BatchLimits
    batches: tuple[CopyBatch, ...]

    @cached_property
    def array(self) -> npt.NDArray[np.int64]:
        """``[batches, 4]``: first layer, layer count, first document, document count."""
        rows = [(b.layers.start, len(b.layers), b.documents.start, len(b.documents)) for b in self]
        return np.array(rows, dtype=np.int64).reshape(-1, 4)

    @cached_property
    def batch_of(self) -> dict[tuple[int, int], int]:
        """The batch number of each (document, layer)."""
        return {
            (document, layer): number
            for number, (layers, documents) in enumerate(self.batches)
            for document in documents
            for layer in layers
        }

    def __iter__(self) -> Iterator[CopyBatch]:
        return iter(self.batches)


@lru_cache(maxsize=1024)
def make_schedule(sizes: tuple[int, ...], num_layers: int, *, packed: bool) -> CopySchedule:
    """The schedule of documents with ``sizes`` bytes per layer, all ``packed`` or all not.

    Short documents send several layers per copy. The last layers go one by one, because a step has
    to compute each of them after its arrival."""
    limits, batches, start = _PACKED if packed else _PLAIN, list[CopyBatch](), 0
    while sizes and start < num_layers:
        immediate = start * sum(sizes) < limits.immediate
        if immediate:
            max_layers = (limits.second if start else limits.first) // sum(sizes)
        elif limits.per_document is None:
            max_layers = limits.combined // sum(sizes)
        else:
            max_layers = limits.per_document // max(sizes)
        layers = range(start, start + max(1, min((num_layers - start) // 2, max_layers)))
        if max_layers and immediate:
            group = len(sizes)
        else:
            group = max(1, limits.combined // (max(sizes) * len(layers)))
        for first in range(0, len(sizes), group):
            batches.append(CopyBatch(layers, range(first, min(len(sizes), first + group))))
        start = layers.stop
    return CopySchedule(limits, tuple(batches))

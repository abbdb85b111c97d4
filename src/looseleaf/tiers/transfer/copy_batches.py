"""What is copied from the host's memory to a GPU at a time.

A copy costs its asking, so there are few, the first layers of all documents first. Those with which
a step can begin are asked for at once; the others while the device has some before them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Portions:
    """How much is copied to a GPU at a time: of all documents the ``first`` that a step can begin
    with, then a ``second`` that comes while it is planned, so that ``at_once`` is asked for at
    once; then ``one`` document's layers, or None for as many of all as go ``together``, and so much
    together; in bytes. And how many such copies may be on their way when the next is asked for."""

    first: int
    second: int
    at_once: int
    one: int | None
    together: int
    ahead: int


_PLAIN = Portions(26 << 20, 52 << 20, 64 << 20, 6 << 20, 18 << 20, 2)
# a kernel behind each copy: to launch it takes as long as to ask for six copies
_PACKED = Portions(30 << 20, 40 << 20, 60 << 20, None, 48 << 20, 1)


class Parcel(NamedTuple):
    """``layers`` of the ``documents``, by their numbers, that go in one copy."""

    layers: range
    documents: range


@dataclass(frozen=True)
class Parcels:
    """The parcels of some documents, in the order in which a step wants them."""

    portions: Portions
    every: tuple[Parcel, ...]

    @cached_property
    def array(self) -> npt.NDArray[np.int64]:
        """``[parcels, 4]``: the first layer and how many, the first document and how many."""
        rows = [(p.layers.start, len(p.layers), p.documents.start, len(p.documents)) for p in self]
        return np.array(rows, dtype=np.int64).reshape(-1, 4)

    @cached_property
    def numbers(self) -> dict[tuple[int, int], int]:
        """Which parcel has a document's layer."""
        return {
            (document, layer): number
            for number, (layers, documents) in enumerate(self.every)
            for document in documents
            for layer in layers
        }

    def __iter__(self) -> Iterator[Parcel]:
        return iter(self.every)


@lru_cache(maxsize=1024)
def parcels_of(sizes: tuple[int, ...], num_layers: int, *, packed: bool) -> Parcels:
    """Parcels of documents whose layers have these ``sizes`` in bytes, all of them ``packed`` or
    not.

    A copy costs its asking, so of short documents several layers go at a time. The first few are
    asked for at once, and a step waits for them; the last layers go one by one, since a step still
    has to compute them."""
    portions, made, start = _PACKED if packed else _PLAIN, list[Parcel](), 0
    while sizes and start < num_layers:
        soon = start * sum(sizes) < portions.at_once
        together = portions.second if start else portions.first
        if soon or portions.one is None:
            most = (together if soon else portions.together) // sum(sizes)
        else:
            most = portions.one // max(sizes)
        layers = range(start, start + max(1, min((num_layers - start) // 2, most)))
        at_a_time = max(1, portions.together // (max(sizes) * len(layers)))
        at_a_time = len(sizes) if most and soon else at_a_time
        for first in range(0, len(sizes), at_a_time):
            made.append(Parcel(layers, range(first, min(len(sizes), first + at_a_time))))
        start = layers.stop
    return Parcels(portions, tuple(made))

"""What a tier is: records by key, read layer by layer.

A record's layer is one run of bytes, its K and then its V, ``[2, pages, kv_heads, page_size,
head_dim]`` as in the device pool, so that a load is a copy; or the same packed, as
`looseleaf.ops.packed_pages` does it. Slots behind the segment's end are 0. Tiers carry bytes: which
of the two they are is a matter of who writes and reads pages."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from jaxtyping import UInt8
from torch import Tensor

from looseleaf.kv.keys import SegmentKey

Fault = Literal["missing", "damaged", "unreadable", "timeout", "unavailable", "full", "unfit"]
"""Why a tier did not do what it was asked for: it has no such record; what it has is not what was
stored; the system refuses this record and no other; it took too long; it can't be reached, or the
system refuses all of it; it has no room; or the record is whole, but of another shape than the
caller's pool."""


class TierFault(Exception):
    """A tier failed. Whoever asked goes on without it; no request ever sees this."""

    def __init__(self, kind: Fault, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Record:
    """What is stored of a segment besides its bytes.

    ``layer_shape`` is ``(2, pages, kv_heads, page_size, head_dim)``; ``dtype`` a safetensors name
    such as ``F32``; ``packed`` whether its bytes are those of `looseleaf.ops.packed_pages`.
    ``tenant`` says whose it is, without naming a salt; empty for none.
    """

    key: SegmentKey
    length: int
    num_layers: int
    layer_shape: tuple[int, int, int, int, int]
    dtype: str
    layer_bytes: int
    tenant: str = ""
    packed: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers."""
        return self.num_layers * self.layer_bytes


@dataclass(eq=False)
class Entry:
    """A record as a tier's books know it; ``num_bytes`` with its side-cars, ``created`` in seconds
    since 1970. One that somebody reads, or that is pinned, is not evicted.
    """

    key: SegmentKey
    num_bytes: int
    tenant: str = ""
    created: float = 0.0
    pinned: bool = False
    readers: int = 0


@runtime_checkable
class Reader(Protocol):
    """An open record. What it reads is what was stored, or it raises TierFault."""

    @property
    def record(self) -> Record:
        """What is stored of the segment besides its bytes."""
        ...

    def read(
        self, layer: int, into: UInt8[Tensor, " layer_bytes"]
    ) -> UInt8[Tensor, " layer_bytes"]:
        """The bytes of a layer: ``into``, filled, or memory of the tier's own, which stays as it is
        until `close`."""
        ...

    def close(self) -> None:
        """Read no more."""
        ...


@runtime_checkable
class Tier(Protocol):
    """A place for records. May be called from several threads; every method may raise TierFault."""

    name: str

    def contains(self, keys: Sequence[SegmentKey]) -> list[bool]:
        """Which of the records are there, as far as can be told without reading them."""
        ...

    def open(self, key: SegmentKey) -> Reader | None:
        """The record for reading, layer by layer; None if it is not there."""
        ...

    def put(self, record: Record, layers: UInt8[Tensor, "layers layer_bytes"]) -> bool:
        """Store a record, all of it or nothing; False if it was there already or is not admitted.

        ``layers`` is in the memory of the host and stays as it is during the call."""
        ...

    def delete(self, keys: Sequence[SegmentKey]) -> int:
        """Drop records; returns how many were there."""
        ...

    def entries(self) -> Iterable[Entry]:
        """All records, least recently used first."""
        ...

    def pin(self, key: SegmentKey, pinned: bool) -> None:
        """Keep a record until it is unpinned, or let it go again; while this process lives."""
        ...

    def close(self) -> None:
        """Let go of files, connections and memory. Nothing may be called after."""
        ...


@dataclass
class TierCounters:
    """What happened at one tier since it was opened.

    ``loads`` are records that arrived whole; each other one asked for counts under the fault that
    ended it. ``refused`` were not stored by the rules of admission, ``skipped`` not tried because
    the tier was given up for a while, ``evicted`` and ``expired`` had to go. ``seconds`` were spent
    reading ``bytes_read``, ``write_seconds`` writing what was ``stored``."""

    loads: int = 0
    stored: int = 0
    refused: int = 0
    skipped: int = 0
    evicted: int = 0
    expired: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: float = 0.0
    write_seconds: float = 0.0
    faults: dict[Fault, int] = field(default_factory=dict)

    def count_fault(self, kind: Fault) -> None:
        """One more failure of that kind."""
        self.faults[kind] = self.faults.get(kind, 0) + 1


def check_name(name: str) -> str:
    """``name`` if it may name a side-car; raises ValueError."""
    if not name or not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
        raise ValueError(f"a side-car's name is letters, digits, - and _, not {name!r}")
    return name

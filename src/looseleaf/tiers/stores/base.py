"""The protocol of a tier: records by key, read layer by layer.

A record's layer is one run of bytes: K, then V, ``[planes, pages, kv_heads, page_size, head_dim]``
as in the device pool. Keys that are the values are the only plane. Slots after the segment's end
are 0. Packed layers have the format of `looseleaf.ops.packed_pages`. Tiers store bytes and do not
interpret them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from jaxtyping import UInt8
from torch import Tensor

from looseleaf.kv.keys import SegmentKey

Fault = Literal["missing", "damaged", "unreadable", "timeout", "unavailable", "full", "unfit"]
"""Kinds of failure. ``missing``: no such record. ``damaged``: its content is not the stored
content. ``unreadable``: the system refuses this record only. ``timeout``: the tier is too slow.
``unavailable``: the tier can't be reached. ``full``: no room. ``unfit``: the record has another
shape than the pool."""


class TierFault(Exception):
    """A tier failed. The caller continues without it; requests never see this error."""

    def __init__(self, kind: Fault, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Record:
    """The description of a stored segment.

    ``layer_shape`` is ``(planes, pages, kv_heads, page_size, head_dim)``. ``dtype`` is a
    safetensors name such as ``F32``. ``packed`` marks the format of `looseleaf.ops.packed_pages`.
    ``tenant`` is a digest of the salt, empty for none."""

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
    """A record in a tier's accounting. ``num_bytes`` includes side-cars; ``created`` is in seconds
    since 1970. Entries with readers or pins are not evicted."""

    key: SegmentKey
    num_bytes: int
    tenant: str = ""
    created: float = 0.0
    pinned: bool = False
    readers: int = 0


@runtime_checkable
class Reader(Protocol):
    """An open record. Reads return the stored content or raise TierFault."""

    @property
    def record(self) -> Record:
        """Description of the record."""
        ...

    def read(
        self, layer: int, into: UInt8[Tensor, " layer_bytes"]
    ) -> UInt8[Tensor, " layer_bytes"]:
        """The bytes of a layer: ``into``, filled, or memory of the tier that stays valid until
        `close`."""
        ...

    def close(self) -> None:
        """Releases the record."""
        ...


@runtime_checkable
class Tier(Protocol):
    """A store of records. Thread-safe; every method may raise TierFault."""

    name: str

    def contains(self, keys: Sequence[SegmentKey]) -> list[bool]:
        """Whether each record exists, without reading it."""
        ...

    def open(self, key: SegmentKey) -> Reader | None:
        """A reader of the record; None if the tier has no such record."""
        ...

    def put(self, record: Record, layers: UInt8[Tensor, "layers layer_bytes"]) -> bool:
        """Stores a whole record. Returns False if it exists already or is not admitted.

        ``layers`` is in host memory and must not change during the call."""
        ...

    def delete(self, keys: Sequence[SegmentKey]) -> int:
        """Deletes records; returns how many existed."""
        ...

    def entries(self) -> Iterable[Entry]:
        """All records, least recently used first."""
        ...

    def pin(self, key: SegmentKey, pinned: bool) -> None:
        """Protects a record from eviction, or ends that, within this process."""
        ...

    def close(self) -> None:
        """Releases files, connections and memory. No call may follow."""
        ...


@dataclass
class TierCounters:
    """Counters of one tier since it was opened.

    ``loads`` counts complete records; each failed load counts under its fault. ``refused`` records
    were not admitted. ``skipped`` calls were not tried because the breaker was open. ``seconds`` is
    the time of reading ``bytes_read``, ``write_seconds`` that of writing ``stored`` records."""

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
        self.faults[kind] = self.faults.get(kind, 0) + 1


def check_name(name: str) -> str:
    """``name`` if it is valid for a side-car; raises ValueError otherwise."""
    if not name or not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
        raise ValueError(f"a side-car's name is letters, digits, - and _, not {name!r}")
    return name

"""A tier around another: every call is passed on, and who inherits from it changes some of them."""

from collections.abc import Iterable, Mapping, Sequence

from jaxtyping import UInt8
from torch import Tensor

from looseleaf.kv.keys import SegmentKey
from looseleaf.tiers.base import Entry, Reader, Record, Tier


class WrappedTier:
    """Does what ``tier`` does, under its name."""

    def __init__(self, tier: Tier, name: str = "") -> None:
        self.tier = tier
        self.name = name or tier.name

    def contains(self, keys: Sequence[SegmentKey]) -> list[bool]:
        """Which of the records are there."""
        return self.tier.contains(keys)

    def open(self, key: SegmentKey) -> Reader | None:
        """The record for reading; None if it is not there."""
        return self.tier.open(key)

    def put(self, record: Record, layers: UInt8[Tensor, "layers layer_bytes"]) -> bool:
        """Store a record; False if it is not admitted or was there."""
        return self.tier.put(record, layers)

    def delete(self, keys: Sequence[SegmentKey]) -> int:
        """Drop records; how many were there."""
        return self.tier.delete(keys)

    def entries(self) -> Iterable[Entry]:
        """All records, least recently used first."""
        return self.tier.entries()

    def put_sidecar(self, key: SegmentKey, name: str, arrays: Mapping[str, Tensor]) -> bool:
        """Store arrays beside a segment; False if it is not there."""
        return self.tier.put_sidecar(key, name, arrays)

    def get_sidecar(self, key: SegmentKey, name: str) -> dict[str, Tensor] | None:
        """The arrays stored beside a segment under ``name``."""
        return self.tier.get_sidecar(key, name)

    def pin(self, key: SegmentKey, pinned: bool) -> None:
        """Keep a record until it is unpinned, or let it go again."""
        self.tier.pin(key, pinned)

    def close(self) -> None:
        """Let go of what it holds."""
        self.tier.close()

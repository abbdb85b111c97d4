"""A tier that delegates to another one; subclasses override single methods."""

from collections.abc import Iterable, Sequence

from jaxtyping import UInt8
from torch import Tensor

from looseleaf.kv.keys import SegmentKey
from looseleaf.tiers.stores.base import Entry, Reader, Record, Tier


class WrappedTier:
    """Delegates every call to ``tier``; ``name`` defaults to its name."""

    def __init__(self, tier: Tier, name: str = "") -> None:
        self.tier = tier
        self.name = name or tier.name

    def contains(self, keys: Sequence[SegmentKey]) -> list[bool]:
        return self.tier.contains(keys)

    def open(self, key: SegmentKey) -> Reader | None:
        return self.tier.open(key)

    def put(self, record: Record, layers: UInt8[Tensor, "layers layer_bytes"]) -> bool:
        return self.tier.put(record, layers)

    def delete(self, keys: Sequence[SegmentKey]) -> int:
        return self.tier.delete(keys)

    def entries(self) -> Iterable[Entry]:
        return self.tier.entries()

    def pin(self, key: SegmentKey, pinned: bool) -> None:
        self.tier.pin(key, pinned)

    def close(self) -> None:
        self.tier.close()

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
        return self.tier.contains(keys)

    def open(self, key: SegmentKey) -> Reader | None:
        return self.tier.open(key)

    def put(self, record: Record, layers: UInt8[Tensor, "layers layer_bytes"]) -> bool:
        return self.tier.put(record, layers)

    def delete(self, keys: Sequence[SegmentKey]) -> int:
        return self.tier.delete(keys)

    def entries(self) -> Iterable[Entry]:
        return self.tier.entries()

    def put_sidecar(self, key: SegmentKey, name: str, arrays: Mapping[str, Tensor]) -> bool:
        return self.tier.put_sidecar(key, name, arrays)

    def get_sidecar(self, key: SegmentKey, name: str) -> dict[str, Tensor] | None:
        return self.tier.get_sidecar(key, name)

    def pin(self, key: SegmentKey, pinned: bool) -> None:
        self.tier.pin(key, pinned)

    def close(self) -> None:
        self.tier.close()

"""Evicted keys: contexts of registered documents that were evicted from the pool.

A tier may still store them, and deleting the document must delete them too. Keys that no tier has
are dropped from time to time, because a document may have ever more contexts."""

from dataclasses import dataclass, field

from looseleaf.kv.keys import SegmentKey
from looseleaf.tiers import Tiers

_FEW = 256


@dataclass(eq=False)
class EvictedSegmentKeys:
    """Evicted keys by the content key of their document."""

    tiers: Tiers | None
    _keys: dict[SegmentKey, set[SegmentKey]] = field(default_factory=dict)
    # number of keys of a content at which the tiers are searched next
    _most: dict[SegmentKey, int] = field(default_factory=dict)

    def add(self, content: SegmentKey, key: SegmentKey) -> None:
        """Add a context that was evicted from the pool."""
        if self.tiers is None:
            return
        keys = self._keys.setdefault(content, set())
        keys.add(key)
        if len(keys) > self._most.get(content, _FEW):
            self._drop_gone(self.tiers, keys)
            self._most[content] = max(_FEW, 2 * len(keys))

    def discard(self, content: SegmentKey, key: SegmentKey) -> None:
        """Remove a context that is in the pool again."""
        self._keys.get(content, set()).discard(key)

    def take(self, content: SegmentKey) -> set[SegmentKey]:
        """Remove and return all keys of a content."""
        self._most.pop(content, None)
        return self._keys.pop(content, set())

    def _drop_gone(self, tiers: Tiers, keys: set[SegmentKey]) -> None:
        gone = keys - tiers.find(list(keys)).keys()
        # a tier that timed out may still have them, so they are deleted there too
        if gone:
            tiers.delete(list(gone))
        keys -= gone

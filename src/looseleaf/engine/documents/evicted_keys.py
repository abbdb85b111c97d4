"""Contexts of registered documents that have left the pool: a tier may still have them.

They are remembered so that a document which is deleted leaves nothing behind. A document that is
used behind ever new texts has ever more of them; what no tier has any more is dropped now and then.
"""

from dataclasses import dataclass, field

from looseleaf.kv.keys import SegmentKey
from looseleaf.tiers import Tiers

_FEW = 256


@dataclass(eq=False)
class EvictedSegmentKeys:
    """Keys by content, which is what a document is apart from its contexts."""

    tiers: Tiers | None
    _keys: dict[SegmentKey, set[SegmentKey]] = field(default_factory=dict)
    # how many of a content are asked about next
    _most: dict[SegmentKey, int] = field(default_factory=dict)

    def add(self, content: SegmentKey, key: SegmentKey) -> None:
        """A context is in the pool no more."""
        if self.tiers is None:
            return
        keys = self._keys.setdefault(content, set())
        keys.add(key)
        if len(keys) > self._most.get(content, _FEW):
            self._drop_gone(self.tiers, keys)
            self._most[content] = max(_FEW, 2 * len(keys))

    def discard(self, content: SegmentKey, key: SegmentKey) -> None:
        """A context is in the pool again."""
        self._keys.get(content, set()).discard(key)

    def take(self, content: SegmentKey) -> set[SegmentKey]:
        """All of a content that nobody has any more; they are forgotten here."""
        self._most.pop(content, None)
        return self._keys.pop(content, set())

    def _drop_gone(self, tiers: Tiers, keys: set[SegmentKey]) -> None:
        gone = keys - tiers.find(list(keys)).keys()
        # of one that did not answer in time they may be there: what is forgotten here must not stay
        if gone:
            tiers.delete(list(gone))
        keys -= gone

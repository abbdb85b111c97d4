"""The order in which cached entries are evicted: segmented LRU (Karedla et al., 1994).

Most texts have a single reader: a question, an answer. With plain LRU they push out documents that
other requests repeat. Here an entry that no second request has read is evicted first. Entries that
were read again hold up to four fifths of the capacity. Beyond that the least recently used of them
become the newest of the others, so documents that requests no longer name leave, too."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

K = TypeVar("K")

_MOST_REUSED = 0.8


class SegmentedLru(Generic[K]):
    """Entries of given sizes, next to be evicted first. ``capacity`` is in the unit of sizes."""

    def __init__(self, capacity: int) -> None:
        self._most_reused = int(_MOST_REUSED * capacity)
        self._once: OrderedDict[K, int] = OrderedDict()
        self._reused: OrderedDict[K, int] = OrderedDict()
        self._reused_size = 0
        self.size = 0
        """The sum of all entries."""

    def __len__(self) -> int:
        return len(self._once) + len(self._reused)

    def __contains__(self, key: object) -> bool:
        return key in self._once or key in self._reused

    def __iter__(self) -> Iterator[K]:
        yield from self._once
        yield from self._reused

    def add(self, key: K, size: int, *, reused: bool) -> None:
        """Add an absent entry as the newest; ``reused`` if a second request has read it."""
        self.size += size
        if not reused:
            self._once[key] = size
            return
        self._reused[key] = size
        self._reused_size += size
        while self._reused_size > self._most_reused:
            oldest, its_size = self._reused.popitem(last=False)
            self._reused_size -= its_size
            self._once[oldest] = its_size

    def remove(self, key: K) -> None:
        """Remove an entry. Raises KeyError if it is absent."""
        if key in self._once:
            size = self._once.pop(key)
        else:
            size = self._reused.pop(key)
            self._reused_size -= size
        self.size -= size

    def pop(self) -> K:
        """Remove and return the next entry to be evicted. Raises KeyError if there is none."""
        key = next(iter(self), None)
        if key is None:
            raise KeyError("no entry is left")
        self.remove(key)
        return key

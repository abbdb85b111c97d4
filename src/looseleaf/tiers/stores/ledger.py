"""Accounting and eviction order of a tier of limited size: LRU with admission control.

A new record is *fresh*, and *hot* after its second request. Fresh records are evicted first, and a
new record never evicts a hot one, so a scan of many documents leaves the hot ones in place. Keys of
evicted records are remembered as ghosts, and return hot. This is 2Q (Johnson and Shasha, VLDB 1994)
with one ghost list."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from looseleaf.kv.keys import SegmentKey
from looseleaf.tiers.stores.base import Entry

_HOT_SHARE = 0.8
_MAX_GHOSTS = 4096


@dataclass(eq=False)
class Ledger:
    """Sizes and keys of one tier's records. The owner holds a lock.

    ``limit`` is in bytes; ``ttl`` in seconds, None for no expiry. ``tenant_share`` of the limit
    bounds each tenant. ``used`` includes reservations."""

    limit: int
    ttl: float | None = None
    tenant_share: float = 1.0
    clock: Callable[[], float] = time.time
    used: int = 0
    _fresh: OrderedDict[SegmentKey, Entry] = field(default_factory=OrderedDict)
    _hot: OrderedDict[SegmentKey, Entry] = field(default_factory=OrderedDict)
    _ghosts: OrderedDict[SegmentKey, None] = field(default_factory=OrderedDict)
    _hot_bytes: int = 0
    _tenants: dict[str, int] = field(default_factory=dict)

    @property
    def _share(self) -> int:
        return int(self.limit * self.tenant_share)

    def __len__(self) -> int:
        return len(self._fresh) + len(self._hot)

    def __iter__(self) -> Iterator[Entry]:
        """All entries in eviction order."""
        yield from [*self._fresh.values(), *self._hot.values()]

    def find(self, key: SegmentKey) -> Entry | None:
        """The entry of ``key`` unless it is expired."""
        entry = self._fresh.get(key) or self._hot.get(key)
        return None if entry is None or self.is_expired(entry) else entry

    def has_entry(self, key: SegmentKey) -> bool:
        """Whether ``key`` has an entry, expired or not."""
        return key in self._fresh or key in self._hot

    def is_expired(self, entry: Entry) -> bool:
        """Whether an entry is expired; pinned entries never are."""
        if self.ttl is None or entry.pinned:
            return False
        return self.clock() - entry.created > self.ttl

    def expired(self) -> list[Entry]:
        """Expired entries without readers."""
        if self.ttl is None:
            return []
        now = self.clock()
        return [
            entry
            for entry in chain(self._fresh.values(), self._hot.values())
            if now - entry.created > self.ttl and not entry.pinned and not entry.readers
        ]

    def touch(self, key: SegmentKey) -> None:
        """Records a use of ``key``."""
        if key in self._fresh:
            entry = self._fresh.pop(key)
            self._hot[key] = entry
            self._hot_bytes += entry.num_bytes
            self._demote()
        elif key in self._hot:
            self._hot.move_to_end(key)

    def victims(
        self,
        num_bytes: int,
        tenant: str,
        key: SegmentKey,
        first: Sequence[Entry] = (),
        *,
        full: bool = False,
    ) -> list[Entry] | None:
        """Entries to evict so that ``num_bytes`` of ``tenant`` fit; None if they are not admitted.

        ``first`` are evicted in any case. With ``full`` the only room is that of evictions. The
        caller removes the entries. A key that is not admitted becomes a ghost, and is admitted next
        time."""
        known = key in self._ghosts
        excess = self._tenants.get(tenant, 0) + num_bytes - self._share
        excess -= sum(entry.num_bytes for entry in first if entry.tenant == tenant)
        limit = min(self.limit, self.used) if full else self.limit
        shortage = self.used + num_bytes - limit - sum(entry.num_bytes for entry in first)
        chosen = {entry.key for entry in first}
        of_tenant = (e for e in self._evictable(known=known) if e.tenant == tenant)
        victims = _first((entry for entry in of_tenant if entry.key not in chosen), excess)
        if victims is not None:
            shortage -= sum(entry.num_bytes for entry in victims)
            chosen |= {entry.key for entry in victims}
            remaining = (e for e in self._evictable(known=known) if e.key not in chosen)
            more = _first(remaining, shortage)
            if more is not None:
                return [*first, *victims, *more]
        self.remember(key)
        return None

    def excess_entries(self) -> list[Entry]:
        """Entries to evict if limits have become smaller: of each tenant above its share, then of
        all."""
        excess = {tenant: num_used - self._share for tenant, num_used in self._tenants.items()}
        victims, rest, shortage = list[Entry](), list[Entry](), self.used - self.limit
        for entry in self._evictable(known=True):
            if excess[entry.tenant] > 0:
                excess[entry.tenant] -= entry.num_bytes
                shortage -= entry.num_bytes
                victims.append(entry)
            else:
                rest.append(entry)
        more = _first(rest, shortage)
        return victims + (rest if more is None else more)

    def eviction_order(self, key: SegmentKey) -> list[Entry]:
        """Entries that ``key`` may evict, in order."""
        return list(self._evictable(known=key in self._ghosts))

    def add_bytes(self, tenant: str, num_bytes: int) -> None:
        """Adds the bytes of a reservation, or removes negative ones."""
        self.used += num_bytes
        num_used = self._tenants.get(tenant, 0) + num_bytes
        self._tenants[tenant] = num_used
        if not num_used:
            del self._tenants[tenant]

    def add(self, entry: Entry) -> None:
        """Adds a stored record."""
        assert entry.key not in self._fresh and entry.key not in self._hot
        hot = self._ghosts.pop(entry.key, entry) is None
        (self._hot if hot else self._fresh)[entry.key] = entry
        self._hot_bytes += entry.num_bytes if hot else 0
        self.add_bytes(entry.tenant, entry.num_bytes)
        self._demote()

    def resize(self, entry: Entry, num_bytes: int) -> None:
        """Changes the size of a stored record by ``num_bytes``."""
        entry.num_bytes += num_bytes
        self._hot_bytes += num_bytes if entry.key in self._hot else 0
        self.add_bytes(entry.tenant, num_bytes)

    def remove(self, key: SegmentKey, *, remember: bool = False) -> Entry | None:
        """Removes an entry, and keeps its key as a ghost with ``remember``; None if missing."""
        entry = self._fresh.pop(key, None)
        if entry is None:
            entry = self._hot.pop(key, None)
            self._hot_bytes -= entry.num_bytes if entry else 0
        if entry is not None:
            self.add_bytes(entry.tenant, -entry.num_bytes)
            if remember:
                self.remember(key)
        return entry

    def _evictable(self, *, known: bool) -> Iterator[Entry]:
        """Entries in eviction order; hot ones only for a ``known`` newcomer. Lazy, because the
        first few usually suffice."""
        expired = {entry.key: entry for entry in self.expired()}
        yield from expired.values()
        for entry in chain(self._fresh.values(), self._hot.values() if known else ()):
            if not entry.pinned and not entry.readers and entry.key not in expired:
                yield entry

    def _demote(self) -> None:
        """Makes the oldest hot records fresh while hot ones exceed their share."""
        while self._hot_bytes > self.limit * _HOT_SHARE and len(self._hot) > 1:
            key, entry = self._hot.popitem(last=False)
            self._hot_bytes -= entry.num_bytes
            self._fresh[key] = entry

    def remember(self, key: SegmentKey) -> None:
        """Makes ``key`` a ghost."""
        self._ghosts[key] = None
        self._ghosts.move_to_end(key)
        while len(self._ghosts) > _MAX_GHOSTS:
            self._ghosts.popitem(last=False)


def _first(entries: Iterable[Entry], num_bytes: int) -> list[Entry] | None:
    """The first entries of ``num_bytes`` in total; None if all have fewer."""
    taken, rest = list[Entry](), iter(entries)
    while num_bytes > 0:
        entry = next(rest, None)
        if entry is None:
            return None
        taken.append(entry)
        num_bytes -= entry.num_bytes
    return taken

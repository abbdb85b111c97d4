"""Which records a tier of limited size keeps: least recently used first, with admission control.

A record is *fresh* when it comes and *hot* once it was asked for again. Fresh records make room
first, and what comes for the first time never drives a hot one out; so reading a thousand documents
once costs the hot ones nothing. What had to go is remembered by name for a while, and comes back
hot. (2Q, Johnson and Shasha, VLDB 1994; one list of names, no copy of their tuning.)"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from looseleaf.kv.keys import SegmentKey
from looseleaf.tiers.stores.base import Entry

_HOT_SHARE = 0.8
_NAMES_KEPT = 4096


@dataclass(eq=False)
class Ledger:
    """Books of one tier; knows sizes and names, not bytes. Its owner holds a lock.

    ``limit`` is in bytes; ``ttl`` in seconds, None for ever; ``tenant_share`` of the limit is what
    the records of one tenant may take. ``used`` counts what is booked, stored or on its way."""

    limit: int
    ttl: float | None = None
    tenant_share: float = 1.0
    clock: Callable[[], float] = time.time
    used: int = 0
    _fresh: OrderedDict[SegmentKey, Entry] = field(default_factory=OrderedDict)
    _hot: OrderedDict[SegmentKey, Entry] = field(default_factory=OrderedDict)
    _gone: OrderedDict[SegmentKey, None] = field(default_factory=OrderedDict)
    _hot_bytes: int = 0
    _tenants: dict[str, int] = field(default_factory=dict)

    @property
    def _share(self) -> int:
        return int(self.limit * self.tenant_share)

    def __len__(self) -> int:
        return len(self._fresh) + len(self._hot)

    def __iter__(self) -> Iterator[Entry]:
        """All entries, those that go first first."""
        yield from [*self._fresh.values(), *self._hot.values()]

    def find(self, key: SegmentKey) -> Entry | None:
        """The entry of ``key`` if it is there and not past its time."""
        entry = self._fresh.get(key) or self._hot.get(key)
        return None if entry is None or self.is_expired(entry) else entry

    def knows(self, key: SegmentKey) -> bool:
        """Whether there is an entry of ``key``, past its time or not."""
        return key in self._fresh or key in self._hot

    def is_expired(self, entry: Entry) -> bool:
        """Whether an entry is past its time; pinned ones never are."""
        if self.ttl is None or entry.pinned:
            return False
        return self.clock() - entry.created > self.ttl

    def expired(self) -> list[Entry]:
        """Entries past their time that nobody reads."""
        if self.ttl is None:
            return []
        # one look at the clock for all of them
        last, now = self.ttl, self.clock()
        return [
            entry
            for entry in chain(self._fresh.values(), self._hot.values())
            if now - entry.created > last and not entry.pinned and not entry.readers
        ]

    def touch(self, key: SegmentKey) -> None:
        """``key`` was asked for again."""
        if key in self._fresh:
            entry = self._fresh.pop(key)
            self._hot[key] = entry
            self._hot_bytes += entry.num_bytes
            self._cool()
        elif key in self._hot:
            self._hot.move_to_end(key)

    def make_room(
        self,
        num_bytes: int,
        tenant: str,
        key: SegmentKey,
        first: Sequence[Entry] = (),
        *,
        full: bool = False,
    ) -> list[Entry] | None:
        """What must go so that ``num_bytes`` of ``tenant`` fit, or None if they are not admitted.
        ``first`` go in any case; where it is ``full``, there is no room but what they leave.

        The caller removes the entries. One that is not admitted has better luck the next time: its
        name is remembered."""
        known = key in self._gone
        excess = self._tenants.get(tenant, 0) + num_bytes - self._share
        excess -= sum(entry.num_bytes for entry in first if entry.tenant == tenant)
        limit = min(self.limit, self.used) if full else self.limit
        short = self.used + num_bytes - limit - sum(entry.num_bytes for entry in first)
        chosen = {entry.key for entry in first}
        own = (e for e in self._in_order(known=known) if e.tenant == tenant)
        going = _first((entry for entry in own if entry.key not in chosen), excess)
        if going is not None:
            short -= sum(entry.num_bytes for entry in going)
            chosen |= {entry.key for entry in going}
            others = (e for e in self._in_order(known=known) if e.key not in chosen)
            more = _first(others, short)
            if more is not None:
                return [*first, *going, *more]
        self.remember(key)
        return None

    def overfull(self) -> list[Entry]:
        """What must go where more is booked than may be: of each tenant what is over its share,
        then of all."""
        excess = {tenant: held - self._share for tenant, held in self._tenants.items()}
        going, rest, short = list[Entry](), list[Entry](), self.used - self.limit
        for entry in self._in_order(known=True):
            if excess[entry.tenant] > 0:
                excess[entry.tenant] -= entry.num_bytes
                short -= entry.num_bytes
                going.append(entry)
            else:
                rest.append(entry)
        more = _first(rest, short)
        return going + (rest if more is None else more)

    def in_order(self, key: SegmentKey) -> list[Entry]:
        """Who may have to go for ``key``, those that go first first."""
        return list(self._in_order(known=key in self._gone))

    def book(self, tenant: str, num_bytes: int) -> None:
        """Count bytes of a record that is on its way, or no longer if they are negative."""
        self.used += num_bytes
        held = self._tenants.get(tenant, 0) + num_bytes
        self._tenants[tenant] = held
        if not held:
            del self._tenants[tenant]

    def add(self, entry: Entry) -> None:
        """Book a record that is stored now."""
        assert entry.key not in self._fresh and entry.key not in self._hot
        hot = self._gone.pop(entry.key, entry) is None
        (self._hot if hot else self._fresh)[entry.key] = entry
        self._hot_bytes += entry.num_bytes if hot else 0
        self.book(entry.tenant, entry.num_bytes)
        self._cool()

    def grow(self, entry: Entry, num_bytes: int) -> None:
        """A stored record got that much longer, or shorter."""
        entry.num_bytes += num_bytes
        self._hot_bytes += num_bytes if entry.key in self._hot else 0
        self.book(entry.tenant, num_bytes)

    def remove(self, key: SegmentKey, *, remember: bool = False) -> Entry | None:
        """Strike a record out, remembering its name if it had to make room; None if it is not
        there."""
        entry = self._fresh.pop(key, None)
        if entry is None:
            entry = self._hot.pop(key, None)
            self._hot_bytes -= entry.num_bytes if entry else 0
        if entry is not None:
            self.book(entry.tenant, -entry.num_bytes)
            if remember:
                self.remember(key)
        return entry

    def _in_order(self, *, known: bool) -> Iterator[Entry]:
        """Who may have to go for a newcomer, in this order: hot ones only if its name is known.

        Most often the first few do: the others are not looked at."""
        late = {entry.key: entry for entry in self.expired()}
        yield from late.values()
        for entry in chain(self._fresh.values(), self._hot.values() if known else ()):
            if not entry.pinned and not entry.readers and entry.key not in late:
                yield entry

    def _cool(self) -> None:
        """Hot records that are too many are fresh again."""
        while self._hot_bytes > self.limit * _HOT_SHARE and len(self._hot) > 1:
            key, entry = self._hot.popitem(last=False)
            self._hot_bytes -= entry.num_bytes
            self._fresh[key] = entry

    def remember(self, key: SegmentKey) -> None:
        """Admit ``key`` as one that was here before when it comes again."""
        self._gone[key] = None
        self._gone.move_to_end(key)
        while len(self._gone) > _NAMES_KEPT:
            self._gone.popitem(last=False)


def _first(entries: Iterable[Entry], num_bytes: int) -> list[Entry] | None:
    """The first entries that have ``num_bytes`` together; None if all of them have fewer."""
    taken, rest = list[Entry](), iter(entries)
    while num_bytes > 0:
        entry = next(rest, None)
        if entry is None:
            return None
        taken.append(entry)
        num_bytes -= entry.num_bytes
    return taken

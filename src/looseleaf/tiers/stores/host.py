"""Segments in the memory of the host: where a GPU's segments go first, and come back from fastest.

Nothing is checked on the way back: it is memory of this process, as the pool itself."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from jaxtyping import UInt8
from torch import Tensor

from looseleaf.kv.keys import SegmentKey
from looseleaf.tiers.stores.arena import Arena, aligned
from looseleaf.tiers.stores.base import Entry, Record, TierCounters
from looseleaf.tiers.stores.ledger import Ledger


@dataclass(eq=False)
class HostSlot:
    """Room for a record that is being filled: ``layers`` ``[layers, layer_bytes]``, not to be seen
    until it is kept."""

    record: Record
    run: UInt8[Tensor, " bytes"]

    @property
    def layers(self) -> UInt8[Tensor, "layers layer_bytes"]:
        return self.run.view(self.record.num_layers, self.record.layer_bytes)


@dataclass(eq=False)
class _Stored:
    slot: HostSlot
    entry: Entry
    gone: bool = False


@dataclass(eq=False)
class HostTier:
    """Records in one arena of ``ledger.limit`` bytes, pinned if a GPU will read it."""

    ledger: Ledger
    pinned: bool = False
    name: str = "host"
    clock: Callable[[], float] = time.time
    counters: TierCounters = field(default_factory=TierCounters)
    _stored: dict[SegmentKey, _Stored] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self._arena = Arena(self.ledger.limit, pinned=self.pinned)

    def contains(self, keys: Sequence[SegmentKey]) -> list[bool]:
        with self._lock:
            return [self.ledger.find(key) is not None for key in keys]

    def open(self, key: SegmentKey) -> "HostReader | None":
        with self._lock:
            stored = self._stored.get(key)
            if stored is None or self.ledger.find(key) is None:
                return None
            stored.entry.readers += 1
            self.ledger.touch(key)
            return HostReader(self, stored)

    def reserve(self, record: Record) -> HostSlot | None:
        """Room to fill with a record, which `keep` stores; None if it is there or not admitted."""
        with self._lock:
            self._expire()
            if self.ledger.find(record.key) is not None:
                self.ledger.touch(record.key)
                return None
            going = self._who_goes(record)
            if going is None:
                self.counters.refused += 1
                return None
            for entry in going:
                self._evict(entry)
            run = self._arena.take(record.num_bytes)
            assert run is not None, "those that went have left a hole"
            # others are not to be promised the same room
            self.ledger.book(record.tenant, record.num_bytes)
            return HostSlot(record, run)

    def keep(self, slot: HostSlot) -> "HostReader":
        """Store what a slot was filled with, open for reading. If the same came first, it is only
        there until it was read."""
        with self._lock:
            record = slot.record
            self.ledger.book(record.tenant, -record.num_bytes)
            entry = Entry(record.key, record.num_bytes, record.tenant, self.clock(), readers=1)
            if record.key in self._stored:
                return HostReader(self, _Stored(slot, entry, gone=True))
            self.ledger.add(entry)
            self._stored[record.key] = stored = _Stored(slot, entry)
            self.counters.stored += 1
            self.counters.bytes_written += record.num_bytes
            return HostReader(self, stored)

    def abandon(self, slot: HostSlot) -> None:
        """Give a slot back that was not filled."""
        with self._lock:
            self.ledger.book(slot.record.tenant, -slot.record.num_bytes)
            self._arena.give(slot.run)

    def put(self, record: Record, layers: UInt8[Tensor, "layers layer_bytes"]) -> bool:
        """Store a copy of a record."""
        slot = self.reserve(record)
        if slot is None:
            return False
        slot.layers.copy_(layers)
        with self._lock:
            kept = self.keep(slot)
            kept.close()
            return not kept.stored.gone

    def delete(self, keys: Sequence[SegmentKey]) -> int:
        """Drop records; one that is being read goes when it was read."""
        with self._lock:
            found = [self._stored[key] for key in keys if key in self._stored]
            for stored in found:
                self._drop(stored, remember=False)
            return len(found)

    def entries(self) -> Iterable[Entry]:
        with self._lock:
            return list(self.ledger)

    def pin(self, key: SegmentKey, pinned: bool) -> None:
        with self._lock:
            if key in self._stored:
                self._stored[key].entry.pinned = pinned

    def close(self) -> None:
        """Nothing to let go of but memory."""
        with self._lock:
            self._stored.clear()

    def release(self, stored: _Stored) -> None:
        """A reader is done."""
        with self._lock:
            stored.entry.readers -= 1
            if stored.gone and not stored.entry.readers:
                self._arena.give(stored.slot.run)

    def _who_goes(self, record: Record) -> list[Entry] | None:
        """Whose going makes room for a record, in one piece; None if it is not admitted, or if
        nothing that may go for it lies side by side, and then nothing is to go."""
        about = record.num_bytes, record.tenant, record.key
        going = self.ledger.make_room(*about)
        if going is None or self._hole(record.num_bytes, going) is not None:
            return going
        # there is room, but in pieces: the first that go until there is a hole, and of these only
        # those in its place
        leaving = {entry.key for entry in going}
        order = [e for e in self.ledger.in_order(record.key) if e.key not in leaving]
        least, most = 0, len(order)
        while least < most:
            half = (least + most) // 2
            if self._hole(record.num_bytes, going + order[:half]) is None:
                least = half + 1
            else:
                most = half
        hole = self._hole(record.num_bytes, going + order[:least])
        if hole is None:
            self.ledger.remember(record.key)
            return None
        return self.ledger.make_room(*about, hole)

    def _hole(self, num_bytes: int, going: Sequence[Entry]) -> list[Entry] | None:
        """Those of ``going`` that leave a hole of ``num_bytes``, the fewest bytes that do; None if
        even all of them do not."""
        pieces: list[tuple[int, int, Entry | None]] = [(*hole, None) for hole in self._arena.holes]
        for entry in going:
            run = self._stored[entry.key].slot.run
            pieces.append((int(run.storage_offset()), aligned(run.numel()), entry))
        size = aligned(num_bytes)
        best: tuple[int, list[Entry]] | None = None
        begin, end, cost, inside = 0, 0, 0, deque[tuple[int, Entry]]()
        for start, length, leaving in sorted(pieces, key=itemgetter(0)):
            if start != end:
                # what lies between stays
                begin, cost = start, 0
                inside.clear()
            end = start + length
            if leaving is not None:
                cost += leaving.num_bytes
                inside.append((end, leaving))
            while inside and end - inside[0][0] >= size:
                # the hole is large enough without the first of those in it
                begin, first = inside.popleft()
                cost -= first.num_bytes
            if end - begin >= size and (best is None or cost < best[0]):
                best = cost, [other for _, other in inside]
        return None if best is None else best[1]

    def tend(self) -> None:
        """Drop what is past its time."""
        with self._lock:
            self._expire()

    def _expire(self) -> None:
        for entry in self.ledger.expired():
            self._drop(self._stored[entry.key], remember=False)
            self.counters.expired += 1

    def _evict(self, entry: Entry) -> None:
        self._drop(self._stored[entry.key], remember=True)
        self.counters.evicted += 1

    def _drop(self, stored: _Stored, *, remember: bool) -> None:
        self.ledger.remove(stored.entry.key, remember=remember)
        del self._stored[stored.entry.key]
        stored.gone = True
        if not stored.entry.readers:
            self._arena.give(stored.slot.run)


@dataclass(eq=False)
class HostReader:
    """A record in place; it stays while it is open."""

    tier: HostTier
    stored: _Stored

    @property
    def record(self) -> Record:
        return self.stored.slot.record

    def read(self, layer: int, into: UInt8[Tensor, " none"]) -> UInt8[Tensor, " layer_bytes"]:
        """The layer where it is; ``into``, which may be empty, is left alone."""
        return self.stored.slot.layers[layer]

    @property
    def address(self) -> int:
        """Where the record begins, all of it in one run."""
        return self.stored.slot.run.data_ptr()

    def close(self) -> None:
        """Let the record go."""
        self.tier.release(self.stored)

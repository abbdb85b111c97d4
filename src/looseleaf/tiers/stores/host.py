"""Records in host memory, the fastest tier of a GPU.

Content is not checked on reads: it is memory of this process, like the pool."""

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
    """Room for a record: ``layers`` ``[layers, layer_bytes]``, hidden until `HostTier.commit`."""

    record: Record
    run: UInt8[Tensor, " bytes"]

    @property
    def layers(self) -> UInt8[Tensor, "layers layer_bytes"]:
        return self.run.view(self.record.num_layers, self.record.layer_bytes)


@dataclass(eq=False)
class _StoredRecord:
    slot: HostSlot
    entry: Entry
    deleted: bool = False


@dataclass(eq=False)
class HostTier:
    """Records in one arena of ``ledger.limit`` bytes, pinned if a GPU reads it."""

    ledger: Ledger
    pinned: bool = False
    name: str = "host"
    clock: Callable[[], float] = time.time
    counters: TierCounters = field(default_factory=TierCounters)
    _stored: dict[SegmentKey, _StoredRecord] = field(default_factory=dict)
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
        """Room for a record; None if it exists or is not admitted."""
        with self._lock:
            self._expire()
            if self.ledger.find(record.key) is not None:
                self.ledger.touch(record.key)
                return None
            victims = self._select_victims(record)
            if victims is None:
                self.counters.refused += 1
                return None
            for entry in victims:
                self._evict(entry)
            run = self._arena.allocate(record.num_bytes)
            assert run is not None, "evictions leave a hole of this size"
            # the reservation counts as used
            self.ledger.add_bytes(record.tenant, record.num_bytes)
            return HostSlot(record, run)

    def commit(self, slot: HostSlot) -> "HostReader":
        """Stores a filled slot and opens it. If the same record came first, this copy lives until
        its reader closes."""
        with self._lock:
            record = slot.record
            self.ledger.add_bytes(record.tenant, -record.num_bytes)
            entry = Entry(record.key, record.num_bytes, record.tenant, self.clock(), readers=1)
            if record.key in self._stored:
                return HostReader(self, _StoredRecord(slot, entry, deleted=True))
            self.ledger.add(entry)
            self._stored[record.key] = stored = _StoredRecord(slot, entry)
            self.counters.stored += 1
            self.counters.bytes_written += record.num_bytes
            return HostReader(self, stored)

    def abandon(self, slot: HostSlot) -> None:
        """Frees a slot that was not filled."""
        with self._lock:
            self.ledger.add_bytes(slot.record.tenant, -slot.record.num_bytes)
            self._arena.free(slot.run)

    def put(self, record: Record, layers: UInt8[Tensor, "layers layer_bytes"]) -> bool:
        """Stores a copy of a record."""
        slot = self.reserve(record)
        if slot is None:
            return False
        slot.layers.copy_(layers)
        with self._lock:
            reader = self.commit(slot)
            reader.close()
            return not reader.stored.deleted

    def delete(self, keys: Sequence[SegmentKey]) -> int:
        """Deletes records; an open one is freed when its readers close."""
        with self._lock:
            stored_records = [self._stored[key] for key in keys if key in self._stored]
            for stored in stored_records:
                self._drop(stored, remember=False)
            return len(stored_records)

    def entries(self) -> Iterable[Entry]:
        with self._lock:
            return list(self.ledger)

    def pin(self, key: SegmentKey, pinned: bool) -> None:
        with self._lock:
            if key in self._stored:
                self._stored[key].entry.pinned = pinned

    def close(self) -> None:
        """Forgets all records."""
        with self._lock:
            self._stored.clear()

    def release(self, stored: _StoredRecord) -> None:
        """Ends one reader."""
        with self._lock:
            stored.entry.readers -= 1
            if stored.deleted and not stored.entry.readers:
                self._arena.free(stored.slot.run)

    def _select_victims(self, record: Record) -> list[Entry] | None:
        """Entries whose eviction leaves a hole for a record. None if it is not admitted, or if no
        hole is possible."""
        victims = self.ledger.victims(record.num_bytes, record.tenant, record.key)
        if victims is None or self._hole(record.num_bytes, victims) is not None:
            return victims
        # the room is fragmented: find the shortest eviction prefix with a hole, and evict only the
        # entries in the hole
        leaving = {entry.key for entry in victims}
        order = [e for e in self.ledger.eviction_order(record.key) if e.key not in leaving]
        low, high = 0, len(order)
        while low < high:
            middle = (low + high) // 2
            if self._hole(record.num_bytes, victims + order[:middle]) is None:
                low = middle + 1
            else:
                high = middle
        hole = self._hole(record.num_bytes, victims + order[:low])
        if hole is None:
            self.ledger.remember(record.key)
            return None
        return self.ledger.victims(record.num_bytes, record.tenant, record.key, hole)

    def _hole(self, num_bytes: int, victims: Sequence[Entry]) -> list[Entry] | None:
        """The entries of ``victims`` with the fewest bytes that leave a hole of ``num_bytes``; None
        if even all of them do not."""
        pieces: list[tuple[int, int, Entry | None]] = [(*hole, None) for hole in self._arena.holes]
        for entry in victims:
            run = self._stored[entry.key].slot.run
            pieces.append((int(run.storage_offset()), aligned(run.numel()), entry))
        size = aligned(num_bytes)
        best: tuple[int, list[Entry]] | None = None
        begin, end, cost, inside = 0, 0, 0, deque[tuple[int, Entry]]()
        for start, length, leaving in sorted(pieces, key=itemgetter(0)):
            if start != end:
                # an entry between the pieces stays
                begin, cost = start, 0
                inside.clear()
            end = start + length
            if leaving is not None:
                cost += leaving.num_bytes
                inside.append((end, leaving))
            while inside and end - inside[0][0] >= size:
                # the hole is large enough without its first entry
                begin, first = inside.popleft()
                cost -= first.num_bytes
            if end - begin >= size and (best is None or cost < best[0]):
                best = cost, [other for _, other in inside]
        return None if best is None else best[1]

    def maintain(self) -> None:
        """Deletes expired records."""
        with self._lock:
            self._expire()

    def _expire(self) -> None:
        for entry in self.ledger.expired():
            self._drop(self._stored[entry.key], remember=False)
            self.counters.expired += 1

    def _evict(self, entry: Entry) -> None:
        self._drop(self._stored[entry.key], remember=True)
        self.counters.evicted += 1

    def _drop(self, stored: _StoredRecord, *, remember: bool) -> None:
        self.ledger.remove(stored.entry.key, remember=remember)
        del self._stored[stored.entry.key]
        stored.deleted = True
        if not stored.entry.readers:
            self._arena.free(stored.slot.run)


@dataclass(eq=False)
class HostReader:
    """A record in place; it stays while the reader is open."""

    tier: HostTier
    stored: _StoredRecord

    @property
    def record(self) -> Record:
        return self.stored.slot.record

    def read(self, layer: int, into: UInt8[Tensor, " none"]) -> UInt8[Tensor, " layer_bytes"]:
        """The layer in place; ``into``, which may be empty, is ignored."""
        return self.stored.slot.layers[layer]

    @property
    def address(self) -> int:
        """Address of the record, which is one run."""
        return self.stored.slot.run.data_ptr()

    def close(self) -> None:
        """Releases the record."""
        self.tier.release(self.stored)

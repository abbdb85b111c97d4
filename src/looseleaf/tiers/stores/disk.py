"""Records as files of a folder, one each, with side-cars in files beside them.

A file appears complete under its final name, or not at all. Files that a killed process left
unfinished are in a folder of their own until the next start deletes them. Processes may share the
folder: each rescans it every few seconds of writing, and finds records of others on lookup."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from jaxtyping import UInt8
from torch import Tensor

from looseleaf.kv.keys import SegmentKey
from looseleaf.tiers.stores.base import Entry, Record, TierCounters, TierFault, check_name
from looseleaf.tiers.stores.disk_reader import DiskReader, disk_faults
from looseleaf.tiers.stores.files import (
    decode_sidecar,
    encode_record,
    encode_sidecar,
    open_quietly,
    raw,
    read_header,
    write_all,
)
from looseleaf.tiers.stores.folder import RECORD, UNFINISHED, Folder, file_name
from looseleaf.tiers.stores.ledger import Ledger

HOSTED = "hosted"
"""The subfolder of host-resident documents, a tier of its own."""

# interval of rescans before writes
_LIST_SECONDS = 5.0


@dataclass(eq=False)
class DiskTier:
    """Records under ``folder``, which is created if missing.

    Existing records are ordered by their last use. Those read after they were written count as hot.
    """

    folder: Path
    ledger: Ledger
    name: str = "disk"
    clock: Callable[[], float] = time.time
    counters: TierCounters = field(default_factory=TierCounters)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _listed_at: float = float("-inf")

    def __post_init__(self) -> None:
        self._files = Folder(self.folder, self.clock, self.counters)
        with disk_faults():
            self._files.create()
            self.maintain()
            # limits may be lower than at the last start
            self._evict(self.ledger.excess_entries())

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether ``folder`` holds a tier."""
        return (folder / UNFINISHED).is_dir() or any(folder.glob(f"*{RECORD}"))

    def contains(self, keys: Sequence[SegmentKey]) -> list[bool]:
        with self._lock, disk_faults():
            return [self._find(key) is not None for key in keys]

    def open(self, key: SegmentKey) -> DiskReader | None:
        """A reader of the record after its header is checked. A damaged record is deleted."""
        with self._lock, disk_faults():
            entry = self._find(key)
            if entry is None:
                return None
            try:
                with self._record_faults(key):
                    file = open_quietly(self._files.file(key))
            except FileNotFoundError:
                self.ledger.remove(key)
                return None
            try:
                with self._record_faults(key):
                    header = read_header(file, key)
                reader = DiskReader(file, header, self.drop_damaged, self._record_faults)
            except BaseException as error:
                os.close(file)
                if isinstance(error, TierFault) and error.kind == "damaged":
                    self.drop_damaged(key)
                raise
            self.ledger.touch(key)
            with suppress(OSError):
                # the last use changes, the modification time stays
                os.utime(file, (self.clock(), os.fstat(file).st_mtime))
            return reader

    def put(
        self,
        record: Record,
        layers: UInt8[Tensor, "layers layer_bytes"],
        *,
        makes_room: bool = True,
    ) -> bool:
        """Writes a record and then renames it. ``makes_room`` permits evictions."""
        # other processes use the same limit, and their records expire too
        if self.clock() - self._listed_at >= _LIST_SECONDS:
            self._rescan()
        with self._lock, disk_faults():
            known = self._find(record.key)
            if known is not None and not self._files.is_there(self._files.file(record.key)):
                # another process deleted the file
                self.ledger.remove(record.key)
                known = None
            self._expire()
            if known is not None:
                self.ledger.touch(record.key)
                return False
        header = encode_record(record, layers)
        size = len(header) + record.num_bytes
        with self._lock, disk_faults():
            if makes_room and not self._make_room(size, record.tenant, record.key):
                return False
        try:
            return self._store(record, header, layers)
        except TierFault as fault:
            # more room does not help a file beyond the size limit
            too_large = getattr(fault.__cause__, "errno", None) == errno.EFBIG
            if fault.kind != "full" or too_large or not makes_room:
                raise
            # the disk is full below the limit: evict as at the limit
            with self._lock, disk_faults():
                if not self._make_room(size, record.tenant, record.key, full=True):
                    raise
        return self._store(record, header, layers)

    def _store(
        self, record: Record, header: bytes, layers: UInt8[Tensor, "layers layer_bytes"]
    ) -> bool:
        # without the lock, so that reads continue
        with disk_faults(), self._files.unfinished() as (file, finish):
            write_all(file, header)
            write_all(file, raw(layers.contiguous().view(-1)))
            with self._lock:
                if self.ledger.find(record.key) is not None:
                    return False
                finish(self._files.file(record.key))
                size = len(header) + record.num_bytes
                self.ledger.add(Entry(record.key, size, record.tenant, self.clock()))
                self.counters.stored += 1
                self.counters.bytes_written += size
        return True

    def delete(self, keys: Sequence[SegmentKey]) -> int:
        removed, fault = 0, None
        with self._lock, disk_faults():
            for key in keys:
                try:
                    removed += self._remove(key, remember=False)
                except TierFault as error:
                    fault = fault or error
        if fault is not None:
            raise fault
        return removed

    def entries(self) -> Iterable[Entry]:
        """All records known to this process, least recently used first."""
        with self._lock:
            return list(self.ledger)

    def put_sidecar(self, key: SegmentKey, name: str, arrays: Mapping[str, Tensor]) -> bool:
        """Stores host arrays of any dtype and shape beside a record under ``name``, replacing
        earlier ones. Returns False without the record."""
        content = encode_sidecar(key, arrays)
        path = self._files.file(key, check_name(name))
        self._files.sidecars.add(name)
        with self._lock, disk_faults():
            entry = self._find(key)
            if entry is None:
                return False
            # the record itself must not be evicted
            entry.readers += 1
            try:
                if not self._make_room(len(content) - self._files.size(path), entry.tenant, key):
                    return False
            finally:
                entry.readers -= 1
        # without the lock, as in `_store`
        with disk_faults(), self._files.unfinished() as (file, finish):
            write_all(file, content)
            with self._lock:
                if self.ledger.find(key) is not entry:
                    # the record was deleted meanwhile
                    return False
                growth = len(content) - self._files.size(path)
                finish(path)
                self.ledger.resize(entry, growth)
                return True

    def get_sidecar(self, key: SegmentKey, name: str) -> dict[str, Tensor] | None:
        """The arrays of a side-car, or None. A damaged side-car is deleted."""
        path = self._files.file(key, check_name(name))
        self._files.sidecars.add(name)
        with disk_faults():
            try:
                with self._files.file_faults(path), os.fdopen(open_quietly(path), "rb") as file:
                    content = file.read()
            except FileNotFoundError:
                return None
            try:
                return decode_sidecar(content, key)
            except TierFault:
                with self._lock, suppress(OSError):
                    size = path.stat().st_size
                    path.unlink()
                    if (entry := self.ledger.find(key)) is not None:
                        self.ledger.resize(entry, -size)
                raise

    def pin(self, key: SegmentKey, pinned: bool) -> None:
        """Protects a record from eviction by this process, or ends that."""
        with self._lock:
            entry = self._find(key)
            if entry is not None:
                entry.pinned = pinned

    def close(self) -> None:
        """Does nothing: no file is open between calls."""

    def drop_damaged(self, key: SegmentKey) -> None:
        """Deletes a damaged record, so that it is written again."""
        with self._lock, suppress(OSError, TierFault):
            self._remove(key, remember=True)

    def drop_page_cache(self, key: SegmentKey) -> None:
        """Evicts a file from the page cache, so that the next read measures the disk."""
        with disk_faults():
            file = os.open(self._files.file(key), os.O_RDONLY)
            try:
                os.fdatasync(file)
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)

    def verify(self) -> Iterator[tuple[str, TierFault | None]]:
        """Reads every file; yields its name and its fault, None if sound.

        Unreadable files may be sound: their fault is not ``damaged``."""
        yield from self._files.verify()

    def discard(self, names: Iterable[str]) -> None:
        """Deletes files by the names of `verify`."""
        fault = None
        for name in names:
            try:
                with disk_faults():
                    (self.folder / name).unlink(missing_ok=True)
            except TierFault as error:
                fault = fault or error
        if fault is not None:
            raise fault

    def _find(self, key: SegmentKey) -> Entry | None:
        """The entry of ``key``; files of other processes are added."""
        entry = self.ledger.find(key)
        path = self._files.file(key)
        if entry is None and not self.ledger.has_entry(key) and self._files.is_there(path):
            for _, new_entry in self._files.entries([path.name]):
                self.ledger.add(new_entry)
            entry = self.ledger.find(key)
        return entry

    def maintain(self) -> None:
        """Rescans the folder and deletes expired records."""
        self._rescan()
        with self._lock, disk_faults():
            self._expire()

    def _rescan(self) -> None:
        """Adds new files to the ledger and removes deleted ones.

        Called without the lock, so that reads continue during the listing. Concurrent stores and
        deletions take precedence."""
        # concurrent writers skip this rescan
        self._listed_at = self.clock()
        with disk_faults():
            present = self._files.names()
            known = {file_name(entry.key): entry.key for entry in self.entries()}
            new = self._files.entries(present - known.keys())
            with self._lock:
                for name in known.keys() - present:
                    if not self._files.is_there(self.folder / name):
                        self.ledger.remove(known[name])
                for used, entry in new:
                    if not self.ledger.has_entry(entry.key) and self._files.is_there(
                        self._files.file(entry.key)
                    ):
                        self.ledger.add(entry)
                        if used > entry.created:
                            self.ledger.touch(entry.key)

    def _expire(self) -> None:
        for entry in self.ledger.expired():
            self._drop(entry, remember=False)
            self.counters.expired += 1

    def _make_room(
        self, num_bytes: int, tenant: str, key: SegmentKey, *, full: bool = False
    ) -> bool:
        victims = self.ledger.victims(num_bytes, tenant, key, full=full)
        if victims is None:
            self.counters.refused += 0 if full else 1
            return False
        self._evict(victims)
        return True

    def _evict(self, victims: Iterable[Entry]) -> None:
        for entry in victims:
            self._drop(entry, remember=True)
            self.counters.evicted += 1

    def _remove(self, key: SegmentKey, *, remember: bool) -> bool:
        entry = self.ledger.remove(key, remember=remember)
        return self._files.remove(key) or entry is not None

    def _drop(self, entry: Entry, *, remember: bool) -> None:
        """Removes a record; a file that can't be deleted only costs its bytes."""
        try:
            self._remove(entry.key, remember=remember)
        except TierFault as fault:
            self.counters.count_fault(fault.kind)

    @contextmanager
    def _record_faults(self, key: SegmentKey) -> Iterator[None]:
        """Converts errors of a record's file to faults, and removes its entry."""
        try:
            with self._files.file_faults(self._files.file(key)):
                yield
        except TierFault as fault:
            if fault.kind == "unreadable":
                with self._lock:
                    self.ledger.remove(key)
            raise

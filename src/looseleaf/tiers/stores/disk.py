"""Segments as files of a folder, one each, with their side-cars in files beside them.

A file appears whole, by its last name, or not at all; what a process that was killed left
unfinished lies in a folder of its own until the next one cleans up. Several processes may share the
folder: each counts all that is there every few seconds in which it writes, and finds what others
wrote when it is asked for it."""

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
"""The folder of hosted documents, a tier of their own, in that of the others."""

# seconds after which the folder is listed again before a record is written to it
_COUNT_AFTER = 5.0


@dataclass(eq=False)
class DiskTier:
    """Records under ``folder``, which is made if need be. What is found there counts as least
    recently used by the time of its last use, and as hot if it was asked for since it was
    written."""

    folder: Path
    ledger: Ledger
    name: str = "disk"
    clock: Callable[[], float] = time.time
    counters: TierCounters = field(default_factory=TierCounters)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _counted: float = float("-inf")

    def __post_init__(self) -> None:
        self._files = Folder(self.folder, self.clock, self.counters)
        with disk_faults():
            self._files.create()
            self.tend()
            # the folder, or a tenant, may have been allowed more before
            self._evict(self.ledger.overfull())

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether a tier was made in ``folder``."""
        return (folder / UNFINISHED).is_dir() or any(folder.glob(f"*{RECORD}"))

    def contains(self, keys: Sequence[SegmentKey]) -> list[bool]:
        with self._lock, disk_faults():
            return [self._find(key) is not None for key in keys]

    def open(self, key: SegmentKey) -> DiskReader | None:
        """The record, if its header is sound. A damaged one is dropped."""
        with self._lock, disk_faults():
            entry = self._find(key)
            if entry is None:
                return None
            try:
                with self._of_record(key):
                    file = open_quietly(self._files.file(key))
            except FileNotFoundError:
                self.ledger.remove(key)
                return None
            try:
                with self._of_record(key):
                    header = read_header(file, key)
                reader = DiskReader(file, header, self.drop_damaged, self._of_record)
            except BaseException as error:
                os.close(file)
                if isinstance(error, TierFault) and error.kind == "damaged":
                    self.drop_damaged(key)
                raise
            self.ledger.touch(key)
            with suppress(OSError):
                # when it was used last, and when it was written, as it was
                os.utime(file, (self.clock(), os.fstat(file).st_mtime))
            return reader

    def put(
        self,
        record: Record,
        layers: UInt8[Tensor, "layers layer_bytes"],
        *,
        makes_room: bool = True,
    ) -> bool:
        """Write a record, then give it its name. One that is deleted again at once need not make
        room."""
        # what others have written takes room as well, and what they wrote may be past its time
        if self.clock() - self._counted >= _COUNT_AFTER:
            self._count()
        with self._lock, disk_faults():
            known = self._find(record.key)
            if known is not None and not self._files.is_there(self._files.file(record.key)):
                # another process has deleted it
                self.ledger.remove(record.key)
                known = None
            self._expire()
            if known is not None:
                self.ledger.touch(record.key)
                return False
        header = encode_record(record, layers)
        about = len(header) + record.num_bytes, record.tenant, record.key
        with self._lock, disk_faults():
            if makes_room and not self._make_room(*about):
                return False
        try:
            return self._store(record, header, layers)
        except TierFault as fault:
            # a file that is too large is so with more room, too
            too_large = getattr(fault.__cause__, "errno", None) == errno.EFBIG
            if fault.kind != "full" or too_large or not makes_room:
                raise
            # others fill the disk: what is here gives way as it does at the limit
            with self._lock, disk_faults():
                if not self._make_room(*about, full=True):
                    raise
        return self._store(record, header, layers)

    def _store(
        self, record: Record, header: bytes, layers: UInt8[Tensor, "layers layer_bytes"]
    ) -> bool:
        # the lock is not held while the file is written: readers go on
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
        """All records that this process knows of, least recently used first."""
        with self._lock:
            return list(self.ledger)

    def put_sidecar(self, key: SegmentKey, name: str, arrays: Mapping[str, Tensor]) -> bool:
        """Store arrays (on the host, any dtype and shape) beside a segment under ``name``, in place
        of those before; False if the segment is not there."""
        content = encode_sidecar(key, arrays)
        path = self._files.file(key, check_name(name))
        self._files.sidecars.add(name)
        with self._lock, disk_faults():
            entry = self._find(key)
            if entry is None:
                return False
            # whatever makes room, it is not the record itself
            entry.readers += 1
            try:
                if not self._make_room(len(content) - self._files.size(path), entry.tenant, key):
                    return False
            finally:
                entry.readers -= 1
        # as with a record, the lock is not held while the file is written
        with disk_faults(), self._files.unfinished() as (file, finish):
            write_all(file, content)
            with self._lock:
                if self.ledger.find(key) is not entry:
                    # the record went meanwhile
                    return False
                more = len(content) - self._files.size(path)
                finish(path)
                self.ledger.grow(entry, more)
                return True

    def get_sidecar(self, key: SegmentKey, name: str) -> dict[str, Tensor] | None:
        """The arrays stored beside a segment; None if there are none. Damaged ones are dropped."""
        path = self._files.file(key, check_name(name))
        self._files.sidecars.add(name)
        with disk_faults():
            try:
                with self._files.refusing(path), os.fdopen(open_quietly(path), "rb") as file:
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
                        self.ledger.grow(entry, -size)
                raise

    def pin(self, key: SegmentKey, pinned: bool) -> None:
        """Keep a record, or let it go again; other processes do not hear of it."""
        with self._lock:
            entry = self._find(key)
            if entry is not None:
                entry.pinned = pinned

    def close(self) -> None:
        """No file is open between calls."""

    def drop_damaged(self, key: SegmentKey) -> None:
        """Delete a record that is not what was stored, so that it is written anew."""
        with self._lock, suppress(OSError, TierFault):
            self._remove(key, remember=True)

    def cool(self, key: SegmentKey) -> None:
        """Have the system forget what it holds of a file in memory, so that the next read is the
        disk's; for measurements."""
        with disk_faults():
            file = os.open(self._files.file(key), os.O_RDONLY)
            try:
                os.fdatasync(file)
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)

    def verify(self) -> Iterator[tuple[str, TierFault | None]]:
        """Read every file: its name, and what is wrong with it, None if nothing is. One that can't
        be read may be sound: its fault is not ``damaged``."""
        yield from self._files.verify()

    def discard(self, names: Iterable[str]) -> None:
        """Delete files by the names that `verify` gives."""
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
        """The entry of ``key``; of a file that another process wrote, a new one."""
        entry = self.ledger.find(key)
        path = self._files.file(key)
        if entry is None and not self.ledger.knows(key) and self._files.is_there(path):
            for _, found in self._files.entries([path.name]):
                self.ledger.add(found)
            entry = self.ledger.find(key)
        return entry

    def tend(self) -> None:
        """Count anew what others may have changed, and drop what is past its time."""
        self._count()
        with self._lock, disk_faults():
            self._expire()

    def _count(self) -> None:
        """Book what is in the folder and was not, and strike out what is no longer there.

        To be called without the lock: whoever asks for a record goes on while the folder is listed,
        and what is stored or deleted meanwhile is as it was left."""
        # other writers need not list it, too
        self._counted = self.clock()
        with disk_faults():
            there = self._files.names()
            booked = {file_name(entry.key): entry.key for entry in self.entries()}
            new = self._files.entries(there - booked.keys())
            with self._lock:
                for name in booked.keys() - there:
                    if not self._files.is_there(self.folder / name):
                        self.ledger.remove(booked[name])
                for used, entry in new:
                    if not self.ledger.knows(entry.key) and self._files.is_there(
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
        going = self.ledger.make_room(num_bytes, tenant, key, full=full)
        if going is None:
            self.counters.refused += 0 if full else 1
            return False
        self._evict(going)
        return True

    def _evict(self, going: Iterable[Entry]) -> None:
        for entry in going:
            self._drop(entry, remember=True)
            self.counters.evicted += 1

    def _remove(self, key: SegmentKey, *, remember: bool) -> bool:
        entry = self.ledger.remove(key, remember=remember)
        return self._files.remove(key) or entry is not None

    def _drop(self, entry: Entry, *, remember: bool) -> None:
        """Remove a record; a file that can't be deleted costs its bytes, and nothing else."""
        try:
            self._remove(entry.key, remember=remember)
        except TierFault as fault:
            self.counters.count_fault(fault.kind)

    @contextmanager
    def _of_record(self, key: SegmentKey) -> Iterator[None]:
        """Errors of one record's file as faults; the record is struck out."""
        try:
            with self._files.refusing(self._files.file(key)):
                yield
        except TierFault as fault:
            if fault.kind == "unreadable":
                with self._lock:
                    self.ledger.remove(key)
            raise

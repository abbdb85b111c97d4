"""The files of a disk tier: names, contents of the folder, and unreadable files.

An unreadable file costs its record, a counted fault and a log line. It is skipped until it changes
or is replaced."""

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from uuid import uuid4

from looseleaf.kv.keys import SegmentKey
from looseleaf.tiers.stores.base import Entry, TierCounters, TierFault
from looseleaf.tiers.stores.disk_reader import disk_faults, is_file_error
from looseleaf.tiers.stores.files import (
    check_file,
    create_unfinished,
    read_tenant,
    remove_abandoned,
)

RECORD, SIDECAR, UNFINISHED = ".segment", ".sidecar", "unfinished"

_log = logging.getLogger(__name__)


def file_name(key: SegmentKey, sidecar: str | None = None) -> str:
    """The file name of a record, or of one of its side-cars."""
    return f"{key.hex()}{RECORD}" if sidecar is None else f"{key.hex()}.{sidecar}{SIDECAR}"


@dataclass(eq=False)
class Folder:
    """Files under ``path``. ``counters`` get one fault per unreadable file."""

    path: Path
    clock: Callable[[], float]
    counters: TierCounters
    # side-car names seen so far, because a lookup is cheaper than a listing
    sidecars: set[str] = field(default_factory=set)
    _prefix: str = field(default_factory=lambda: uuid4().hex)
    _counter: Iterator[int] = field(default_factory=count)
    # unreadable files, with their state
    _unreadable: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def create(self) -> None:
        """Creates the folder and deletes abandoned files. Raises OSError if it is not writable."""
        unfinished = self.path / UNFINISHED
        self.path.mkdir(parents=True, exist_ok=True)
        if not unfinished.is_dir():
            # a file or a dangling link may have that name
            with suppress(OSError):
                unfinished.unlink()
            unfinished.mkdir(exist_ok=True)
        with suppress(OSError):
            for path in unfinished.iterdir():
                # such a file costs its bytes, not the tier
                with suppress(OSError):
                    remove_abandoned(path, self.clock())

    def file(self, key: SegmentKey, sidecar: str | None = None) -> Path:
        """The path of a record, or of one of its side-cars."""
        return self.path / file_name(key, sidecar)

    def names(self) -> set[str]:
        """All file names; empty if the folder was deleted. Unreadable files that changed are
        retried."""
        names: set[str] = set()
        # the next write creates the folder again
        with suppress(FileNotFoundError):
            names = set(os.listdir(self.path))
        for name, state in list(self._unreadable.items()):
            if name not in names or _state(self.path / name) != state:
                self.readmit(name)
        for name in names:
            if name.endswith(SIDECAR):
                self.sidecars.add(name.removesuffix(SIDECAR).partition(".")[2])
        return names

    def is_there(self, path: Path) -> bool:
        """Whether a readable file exists."""
        if path.name in self._unreadable:
            return False
        with self.skipping_unreadable(path):
            return stat.S_ISREG(path.stat().st_mode)
        return False

    def size(self, path: Path) -> int:
        """Size of a file, 0 if missing or unreadable."""
        with self.skipping_unreadable(path):
            return path.stat().st_size
        return 0

    def entries(self, names: Iterable[str]) -> list[tuple[float, Entry]]:
        """The records among ``names`` with their last access, in that order."""
        records: list[tuple[float, str, Entry]] = []
        for name in names:
            if not name.endswith(RECORD) or name in self._unreadable:
                continue
            path = self.path / name
            with suppress(ValueError), self.skipping_unreadable(path):
                key = SegmentKey(bytes.fromhex(name.removesuffix(RECORD)))
                status = path.stat()
                # a name in capitals is no record
                if path != self.file(key):
                    continue
                if not stat.S_ISREG(status.st_mode):
                    raise OSError(errno.EINVAL, "this is no regular file", str(path))
                size = status.st_size + sum(
                    self.size(self.file(key, name)) for name in self._sidecar_names()
                )
                # times in the future count as now
                written = min(status.st_mtime, self.clock())
                tenant = read_tenant(path, key)
                records.append((status.st_atime, name, Entry(key, size, tenant, written)))
        return [(used, entry) for used, _, entry in sorted(records, key=lambda record: record[:2])]

    def remove(self, key: SegmentKey) -> bool:
        """Deletes a record and its side-cars; returns whether it existed.

        Raises TierFault for a file that can't be deleted, after the others."""
        path, fault = self.file(key), None
        existed = self.is_there(path)
        for target in (path, *(self.file(key, name) for name in self._sidecar_names())):
            try:
                with self.file_faults(target):
                    target.unlink(missing_ok=True)
                    self.readmit(target.name)
            except TierFault as error:
                fault = fault or error
        if fault is not None:
            raise fault
        return existed

    def verify(self) -> Iterator[tuple[str, TierFault | None]]:
        """Reads every file; yields its name and its fault, None if sound.

        Unreadable files may be sound: their fault is not ``damaged``."""
        with disk_faults():
            names = self.names()
        for ending in (RECORD, SIDECAR):
            for name in sorted(name for name in names if name.endswith(ending)):
                try:
                    with disk_faults(), self.file_faults(self.path / name):
                        check_file(self.path / name)
                except TierFault as fault:
                    # a concurrent deletion is no damage
                    gone = isinstance(fault.__cause__, FileNotFoundError)
                    if not gone or (self.path / name).is_symlink():
                        yield name, fault
                else:
                    yield name, None

    def readmit(self, name: str) -> None:
        """Ends the skipping of a file."""
        self._unreadable.pop(name, None)

    @contextmanager
    def file_faults(self, path: Path) -> Iterator[None]:
        """Converts errors of one file to TierFault (``unreadable``); the caller counts it."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            if not self._is_file_error(error):
                raise
            self._mark_unreadable(path, error)
            raise TierFault("unreadable", f"disk: {error}") from error

    @contextmanager
    def skipping_unreadable(self, path: Path) -> Iterator[None]:
        """Ignores a missing file, and counts and ignores an unreadable one."""
        known = path.name in self._unreadable
        try:
            with self.file_faults(path):
                yield
        except FileNotFoundError as error:
            if not path.is_symlink():
                return
            # a dangling link
            self._mark_unreadable(path, error)
        except TierFault as fault:
            if fault.kind != "unreadable":
                raise
        else:
            return
        if not known:
            self.counters.count_fault("unreadable")

    @contextmanager
    def unfinished(self) -> Iterator[tuple[int, Callable[[Path], None]]]:
        """A new file, and the call that renames it. Without the call it is deleted."""
        path = self.path / UNFINISHED / f"{self._prefix}-{next(self._counter)}"

        def finish(name: Path) -> None:
            with self.file_faults(name):
                os.replace(path, name)
            self.readmit(name.name)

        file = create_unfinished(path)
        try:
            yield file, finish
        finally:
            os.close(file)
            path.unlink(missing_ok=True)

    def _sidecar_names(self) -> list[str]:
        # a copy, because other threads add names
        return list(self.sidecars)

    def _is_file_error(self, error: OSError) -> bool:
        """Whether an error concerns a file while the folder is readable."""
        if not is_file_error(error):
            return False
        try:
            os.stat(os.path.join(self.path, "."))
        except OSError:
            return False
        return True

    def _mark_unreadable(self, path: Path, error: OSError) -> None:
        if path.name not in self._unreadable:
            _log.warning("%s is skipped, because the system refuses it: %s", path, error)
        self._unreadable[path.name] = _state(path)


def _state(path: Path) -> tuple[int, ...]:
    """Values that change with a file's content or permissions; empty if unknown."""
    try:
        status = path.lstat()
    except OSError:
        return ()
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns

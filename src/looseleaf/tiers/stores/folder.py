"""The files of a disk tier: their names, what each says of itself, and the ones that the system
refuses.

A file that can't be read costs its own record, a count and a line in the log. It is left out until
it changes or a new one takes its place."""

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
from looseleaf.tiers.stores.disk_reader import disk_faults, is_of_file
from looseleaf.tiers.stores.files import (
    check_file,
    create_unfinished,
    read_tenant,
    remove_abandoned,
)

RECORD, SIDECAR, UNFINISHED = ".segment", ".sidecar", "unfinished"

_log = logging.getLogger(__name__)


def file_name(key: SegmentKey, sidecar: str | None = None) -> str:
    """The name of a record's file, or of one of its side-cars."""
    return f"{key.hex()}{RECORD}" if sidecar is None else f"{key.hex()}.{sidecar}{SIDECAR}"


@dataclass(eq=False)
class Folder:
    """Files under ``path``. ``counters`` get one fault for each file that is refused."""

    path: Path
    clock: Callable[[], float]
    counters: TierCounters
    # the names of side-cars that were seen here: to look for one costs less than to list the folder
    sidecars: set[str] = field(default_factory=set)
    _own: str = field(default_factory=lambda: uuid4().hex)
    _numbers: Iterator[int] = field(default_factory=count)
    # refused files, with their state at that time
    _refused: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def create(self) -> None:
        """Make the folder, and delete files that ended processes left unfinished. Raises OSError
        where it can't be written to."""
        unfinished = self.path / UNFINISHED
        self.path.mkdir(parents=True, exist_ok=True)
        if not unfinished.is_dir():
            # neither a file nor a link that leads nowhere keeps records from being written
            with suppress(OSError):
                unfinished.unlink()
            unfinished.mkdir(exist_ok=True)
        with suppress(OSError):
            for path in unfinished.iterdir():
                # a file that can't be deleted costs its bytes, not the tier
                with suppress(OSError):
                    remove_abandoned(path, self.clock())

    def file(self, key: SegmentKey, sidecar: str | None = None) -> Path:
        """Where a record lies, or one of its side-cars."""
        return self.path / file_name(key, sidecar)

    def names(self) -> set[str]:
        """Names of all files; none if the folder was deleted. Files that changed since they were
        refused are looked at again."""
        names: set[str] = set()
        # a folder that was deleted is made again by the next write
        with suppress(FileNotFoundError):
            names = set(os.listdir(self.path))
        for name, state in list(self._refused.items()):
            if name not in names or _state(self.path / name) != state:
                self.admit(name)
        for name in names:
            if name.endswith(SIDECAR):
                self.sidecars.add(name.removesuffix(SIDECAR).partition(".")[2])
        return names

    def is_there(self, path: Path) -> bool:
        """Whether a file is there, and was not refused."""
        if path.name in self._refused:
            return False
        with self.leaving_out(path):
            return stat.S_ISREG(path.stat().st_mode)
        return False

    def size(self, path: Path) -> int:
        """Bytes of a file, 0 if it is not there or refused."""
        with self.leaving_out(path):
            return path.stat().st_size
        return 0

    def entries(self, names: Iterable[str]) -> list[tuple[float, Entry]]:
        """The records among the files of these names, each behind the time of its last use, in
        that order."""
        found: list[tuple[float, str, Entry]] = []
        for name in names:
            if not name.endswith(RECORD) or name in self._refused:
                continue
            path = self.path / name
            with suppress(ValueError), self.leaving_out(path):
                key = SegmentKey(bytes.fromhex(name.removesuffix(RECORD)))
                about = path.stat()
                # a name in capitals is no record's
                if path != self.file(key):
                    continue
                if not stat.S_ISREG(about.st_mode):
                    raise OSError(errno.EINVAL, "this is no regular file", str(path))
                size = about.st_size + sum(self.size(self.file(key, one)) for one in self._known())
                # a clock that was ahead must not make it young for ever
                written = min(about.st_mtime, self.clock())
                tenant = read_tenant(path, key)
                found.append((about.st_atime, name, Entry(key, size, tenant, written)))
        return [(used, entry) for used, _, entry in sorted(found, key=lambda one: one[:2])]

    def remove(self, key: SegmentKey) -> bool:
        """Delete a record with its side-cars; whether it was there. Raises TierFault for a file
        that can't be deleted, after all others."""
        path, fault = self.file(key), None
        was_there = self.is_there(path)
        for one in (path, *(self.file(key, name) for name in self._known())):
            try:
                with self.refusing(one):
                    one.unlink(missing_ok=True)
                    self.admit(one.name)
            except TierFault as error:
                fault = fault or error
        if fault is not None:
            raise fault
        return was_there

    def verify(self) -> Iterator[tuple[str, TierFault | None]]:
        """Read every file: its name, and what is wrong with it, None if nothing is. A file that
        can't be read may be sound: its fault is not ``damaged``."""
        with disk_faults():
            names = self.names()
        for ending in (RECORD, SIDECAR):
            for name in sorted(one for one in names if one.endswith(ending)):
                try:
                    with disk_faults(), self.refusing(self.path / name):
                        check_file(self.path / name)
                except TierFault as fault:
                    # a file that an engine has deleted meanwhile was not damaged
                    gone = isinstance(fault.__cause__, FileNotFoundError)
                    if not gone or (self.path / name).is_symlink():
                        yield name, fault
                else:
                    yield name, None

    def admit(self, name: str) -> None:
        """A file of that name may be asked for again."""
        self._refused.pop(name, None)

    @contextmanager
    def refusing(self, path: Path) -> Iterator[None]:
        """Errors of one file as a TierFault (``unreadable``), for the caller to count."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            if not self._is_well(error):
                raise
            self._refuse(path, error)
            raise TierFault("unreadable", f"disk: {error}") from error

    @contextmanager
    def leaving_out(self, path: Path) -> Iterator[None]:
        """Pass over a file that is not there, or that the system refuses, which is counted."""
        known = path.name in self._refused
        try:
            with self.refusing(path):
                yield
        except FileNotFoundError as error:
            if not path.is_symlink():
                return
            # a link that leads nowhere
            self._refuse(path, error)
        except TierFault as fault:
            if fault.kind != "unreadable":
                raise
        else:
            return
        if not known:
            self.counters.count_fault("unreadable")

    @contextmanager
    def unfinished(self) -> Iterator[tuple[int, Callable[[Path], None]]]:
        """A new file, and the call that gives it its name; without that it is gone in the end."""
        path = self.path / UNFINISHED / f"{self._own}-{next(self._numbers)}"

        def finish(name: Path) -> None:
            with self.refusing(name):
                os.replace(path, name)
            self.admit(name.name)

        file = create_unfinished(path)
        try:
            yield file, finish
        finally:
            os.close(file)
            path.unlink(missing_ok=True)

    def _known(self) -> list[str]:
        # another thread may see a new one meanwhile
        return list(self.sidecars)

    def _is_well(self, error: OSError) -> bool:
        """Whether an error is that of a file, and the folder itself can be read."""
        if not is_of_file(error):
            return False
        try:
            os.stat(os.path.join(self.path, "."))
        except OSError:
            return False
        return True

    def _refuse(self, path: Path, error: OSError) -> None:
        if path.name not in self._refused:
            _log.warning("%s is left out, since the system refuses it: %s", path, error)
        self._refused[path.name] = _state(path)


def _state(path: Path) -> tuple[int, ...]:
    """What changes when a file is replaced or its permissions are; empty if that is not known."""
    try:
        about = path.lstat()
    except OSError:
        return ()
    return about.st_ino, about.st_mtime_ns, about.st_ctime_ns

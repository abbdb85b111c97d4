"""Records of registered documents: one file each, beside the files of the disk tier.

Servers of one model share a folder of records, and every model has a separate folder. Writes are
atomic renames. `registering` restores the records at start."""

import asyncio
import errno
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal
from uuid import uuid4

from pydantic import Field, ValidationError

from looseleaf.config import IndexKind
from looseleaf.errors import DocumentNotFound
from looseleaf.server.errors import unavailable
from looseleaf.server.protocol.base import Strict

FOLDER = "registered"
"""In the folder of the disk tier."""

_ENDING = ".json"
_LOCK = ".lock"
_LOCK_SECONDS = 0.01


class Registration(Strict):
    """The target of a registration: the chats of a model, or an index."""

    model: str
    system: str | None
    hosted: bool
    index: IndexKind


class Record(Strict):
    """A registered document."""

    version: Literal[1] = 1
    tenant: str
    id: str
    title: str | None
    text: str | list[str]
    pinned: bool
    registrations: Annotated[list[Registration], Field(min_length=1)]


class FolderLock:
    """A lock for the coroutines of one event loop, and by a file of ``folder`` for processes.

    Without a folder, or with one that can't be written, it is a lock of this process."""

    def __init__(self, folder: Path | None = None) -> None:
        self._lock, self._folder = asyncio.Lock(), folder
        self._file: int | None = None

    async def __aenter__(self) -> None:
        await self._lock.acquire()
        try:
            while self._folder is not None and not self._lock_file(self._folder):
                await asyncio.sleep(_LOCK_SECONDS)
        except BaseException:
            self._lock.release()
            raise

    async def __aexit__(self, *_: object) -> None:
        if self._file is not None:
            # the system drops the file's lock with its last descriptor
            os.close(self._file)
            self._file = None
        self._lock.release()

    def _lock_file(self, folder: Path) -> bool:
        """Whether no other process has the lock now."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o660)
        except OSError:
            # the write that follows reports a folder that can't be written
            return True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        self._file = file
        return True


class Records:
    """The records of one model's documents; without a disk tier ``folder`` is None.

    ``coming`` are the names of records from before the start that are not registered again yet,
    oldest first. ``unlisted`` is the error of listing them, None after success. ``unkept`` are
    names of documents whose latest registration could not be written. ``unremoved`` are names of
    deleted documents whose record could not be removed. Callers hold ``lock`` to update or remove a
    record; if several processes have ``shared`` records, it excludes them too."""

    def __init__(self, disk_path: str | None, model: str, *, shared: bool = False) -> None:
        self.folder: Path | None = None
        self._shared = shared
        self.lock = FolderLock()
        self.coming: dict[str, None] = {}
        self.unlisted: str | None = None
        self.unkept: set[str] = set()
        self.unremoved: set[str] = set()
        if disk_path is not None:
            self.folder = Path(disk_path).expanduser() / FOLDER / _digest(model)
            self.lock = FolderLock(self.folder if shared else None)
            self.expect_all()

    def expect_all(self) -> None:
        """Expect the documents of all records: at the start of an engine, none is registered."""
        if self.folder is None:
            return
        self.coming, self.unlisted = {}, None
        try:
            self.coming = dict.fromkeys(_found(self.folder))
        except OSError as error:
            # a missing folder has no records; any other error may hide records
            if not isinstance(error, FileNotFoundError) or os.path.lexists(self.folder):
                self.unlisted = str(error)

    def read(self, name: str) -> Record:
        """The record with this name. Raises OSError, and ValueError for a damaged record."""
        content = _read_file(self._path(name))
        try:
            record = Record.model_validate_json(content)
        except ValidationError as error:
            # the error's own message would quote the document
            first = error.errors(include_input=False, include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"damaged: {where + ': ' if where else ''}{first['msg']}") from None
        if record_name(record.tenant, record.id) != name:
            raise ValueError("damaged: it is the record of another document")
        return record

    def write(self, record: Record) -> None:
        """Write or replace a record; for the same text, earlier registrations remain.

        Raises OSError."""
        name = record_name(record.tenant, record.id)
        with suppress(OSError, ValueError):
            before = self.read(name)
            if before.text == record.text:
                new = [item for item in record.registrations if item not in before.registrations]
                both = [*before.registrations, *new]
                record = record.model_copy(update={"title": before.title, "registrations": both})
        self._replace(name, record)

    def pin(self, tenant: str, document_id: str, pinned: bool) -> None:
        """Update the pin of a record. Raises OSError, and ValueError for a damaged record."""
        name = record_name(tenant, document_id)
        with suppress(FileNotFoundError):
            record = self.read(name)
            if record.pinned != pinned:
                self._replace(name, record.model_copy(update={"pinned": pinned}))

    def remove(self, tenant: str, document_id: str) -> None:
        """Remove the record of a document, if it has one. Raises OSError."""
        self._path(record_name(tenant, document_id)).unlink(missing_ok=True)

    def has(self, tenant: str, document_id: str) -> bool:
        """Whether a document has a record, readable or not."""
        return os.path.lexists(self._path(record_name(tenant, document_id)))

    def keeps(self, tenant: str, document_id: str) -> bool | None:
        """Whether a registered document survives a restart; None without a disk tier."""
        if self.folder is None:
            return None
        if self._shared:
            # another process may have failed to write it
            return self.has(tenant, document_id)
        return record_name(tenant, document_id) not in self.unkept

    @contextmanager
    def expecting(self, tenant: str, *document_ids: str) -> Iterator[None]:
        """Raises ApiError (503) instead of DocumentNotFound for a record not yet registered."""
        try:
            yield
        except DocumentNotFound:
            coming = (i for i in document_ids if record_name(tenant, i) in self.coming)
            document_id = next(coming, None)
            if document_id is None:
                raise
            raise unavailable(
                f"document {document_id!r} is being restored after a restart: ask again in a "
                "moment",
                "document_coming",
            ) from None

    def _path(self, name: str) -> Path:
        assert self.folder is not None, "records need a disk tier"
        return self.folder / name

    def _replace(self, name: str, record: Record) -> None:
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{uuid4().hex}.tmp")
        try:
            with open(unfinished, "xb", opener=_open_own) as file:
                file.write(record.model_dump_json().encode("utf-8"))
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)


def record_name(tenant: str, document_id: str) -> str:
    """The name of a document's file: a digest, because ids may contain any characters."""
    return _digest(json.dumps([tenant, document_id])) + _ENDING


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _open_own(path: str, flags: int) -> int:
    # the permissions of the tier's files
    return os.open(path, flags, 0o660)


def _found(folder: Path) -> list[str]:
    """The names of all records, oldest first. Raises OSError for a folder that can't be listed."""
    records = []
    for name in [name for name in os.listdir(folder) if name.endswith(_ENDING)]:
        written = 0
        # `read` reports a file whose status is unavailable
        with suppress(OSError):
            written = os.lstat(folder / name).st_mtime_ns
        records.append((written, name))
    return [name for _, name in sorted(records)]


def _read_file(path: Path) -> bytes:
    """The bytes of a regular file; returns or raises immediately even for a pipe.

    Raises FileNotFoundError only for an unused name, and another OSError for any other kind of
    file."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
            return file.read()
    except FileNotFoundError as error:
        if path.is_symlink():
            raise OSError(errno.ELOOP, "it is a link that leads nowhere") from error
        raise

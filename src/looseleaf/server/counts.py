"""Counts of running requests, waiting outputs and rate limits: of one process, or of several.

Processes share a table in memory. Each adds to its own column, so the counts of a process that ends
are dropped with its column, and a lock makes a check and its addition one operation."""

import fcntl
import hashlib
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from looseleaf.errors import InvalidOption

QUEUE = "queue"
"""The name of the outputs in the queue, which no key has."""

_MAX_NAMES = 1 << 15
_TAG = struct.Struct("<q")
_BUCKET = struct.Struct("<dd")
_COUNT = struct.Struct("<q")


class Counts:
    """Counts of one process by name, and a token bucket for each name."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._buckets: dict[str, tuple[float, float]] = {}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """A check and a change as one operation."""
        yield

    def total(self, name: str) -> int:
        """The count of ``name`` in all processes."""
        return self._numbers.get(name, 0)

    def add(self, name: str, number: int) -> None:
        """Add to this process's count of ``name``."""
        self._numbers[name] = self._numbers.get(name, 0) + number

    def bucket(self, name: str) -> tuple[float, float] | None:
        """The tokens of a bucket and the time of its latest change; None before the first."""
        return self._buckets.get(name)

    def set_bucket(self, name: str, tokens: float, moment: float) -> None:
        """Change a bucket."""
        self._buckets[name] = tokens, moment

    def drop(self, name: str) -> None:
        """Drop the count and the bucket of a name, unless its count is above 0."""
        if not self._numbers.get(name):
            self._numbers.pop(name, None)
            self._buckets.pop(name, None)


def make_table(num_processes: int) -> int:
    """The descriptor of an empty table for a number of processes."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("looseleaf-counts")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, _MAX_NAMES * _row_size(num_processes))
    return descriptor


class SharedCounts(Counts):
    """The counts of process ``slot`` of ``num_processes``, in a table of `make_table`.

    It begins with empty counts, also if it replaces a process that has ended. Only one thread may
    use it. Rows of names stay until the table ends, so `drop` has no effect."""

    def __init__(self, descriptor: int, slot: int, num_processes: int) -> None:
        super().__init__()
        self._descriptor, self._num = descriptor, num_processes
        self._row = _row_size(num_processes)
        self._table = mmap.mmap(descriptor, _MAX_NAMES * self._row)
        self._column = _TAG.size + _BUCKET.size + slot * _COUNT.size
        self._rows: dict[str, int] = {}
        with self.locked():
            for begin in range(0, len(self._table), self._row):
                if _COUNT.unpack_from(self._table, begin + self._column)[0]:
                    _COUNT.pack_into(self._table, begin + self._column, 0)

    @contextmanager
    def locked(self) -> Iterator[None]:
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def total(self, name: str) -> int:
        begin = self._begin(name) + _TAG.size + _BUCKET.size
        columns = range(begin, begin + self._num * _COUNT.size, _COUNT.size)
        return sum(int(_COUNT.unpack_from(self._table, column)[0]) for column in columns)

    def add(self, name: str, number: int) -> None:
        where = self._begin(name) + self._column
        (count,) = _COUNT.unpack_from(self._table, where)
        _COUNT.pack_into(self._table, where, count + number)

    def bucket(self, name: str) -> tuple[float, float] | None:
        tokens, moment = _BUCKET.unpack_from(self._table, self._begin(name) + _TAG.size)
        return (tokens, moment) if moment else None

    def set_bucket(self, name: str, tokens: float, moment: float) -> None:
        _BUCKET.pack_into(self._table, self._begin(name) + _TAG.size, tokens, moment)

    def _begin(self, name: str) -> int:
        """Where the row of ``name`` begins; a new name takes a free row."""
        begin = self._rows.get(name)
        if begin is None:
            begin = self._rows[name] = self._find(name)
        return begin

    def _find(self, name: str) -> int:
        digest = hashlib.sha256(name.encode()).digest()
        # 0 is a free row
        tag = int.from_bytes(digest[:8], "little", signed=True) or 1
        first = int.from_bytes(digest[8:16], "little")
        for step in range(_MAX_NAMES):
            begin = (first + step) % _MAX_NAMES * self._row
            (known,) = _TAG.unpack_from(self._table, begin)
            if not known:
                _TAG.pack_into(self._table, begin, tag)
            if known in (0, tag):
                return begin
        raise InvalidOption(f"several API processes can count {_MAX_NAMES} keys: use fewer keys")


def _row_size(num_processes: int) -> int:
    return _TAG.size + _BUCKET.size + num_processes * _COUNT.size

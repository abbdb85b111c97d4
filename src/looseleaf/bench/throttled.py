"""A tier of a chosen speed: memory of the host that takes its time."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from torch import Tensor

from looseleaf.kv.keys import SegmentKey
from looseleaf.tiers import Entry, HostTier, Ledger, Reader, Record


class ThrottledTier:
    """Gives ``rate`` bytes a second, whoever reads, after ``latency`` seconds for each record;
    writing is free."""

    def __init__(self, name: str, rate: float, latency: float, num_bytes: int) -> None:
        self.name = name
        self.rate = rate
        self.latency = latency
        self._held = HostTier(Ledger(num_bytes))
        self._due, self._lock = 0.0, threading.Lock()

    def contains(self, keys: Sequence[SegmentKey]) -> list[bool]:
        """Which of the records are there."""
        return self._held.contains(keys)

    def open(self, key: SegmentKey) -> Reader | None:
        """The record, after the latency."""
        reader = self._held.open(key)
        if reader is None:
            return None
        time.sleep(self.latency)
        return _SlowReader(reader, self.wait)

    def wait(self, num_bytes: int) -> None:
        """Return when so many bytes more are due."""
        with self._lock:
            self._due = due = max(self._due, time.perf_counter()) + num_bytes / self.rate
        time.sleep(max(0.0, due - time.perf_counter()))

    def put(self, record: Record, layers: Tensor) -> bool:
        """Store a record."""
        return self._held.put(record, layers)

    def delete(self, keys: Sequence[SegmentKey]) -> int:
        """Drop records."""
        return self._held.delete(keys)

    def entries(self) -> Iterable[Entry]:
        """All records."""
        return self._held.entries()

    def put_sidecar(self, key: SegmentKey, name: str, arrays: Mapping[str, Tensor]) -> bool:
        """Store a side-car."""
        return self._held.put_sidecar(key, name, arrays)

    def get_sidecar(self, key: SegmentKey, name: str) -> dict[str, Tensor] | None:
        """A side-car."""
        return self._held.get_sidecar(key, name)

    def pin(self, key: SegmentKey, pinned: bool) -> None:
        """Keep a record, or let it go again."""
        self._held.pin(key, pinned)

    def close(self) -> None:
        """Let go of the memory."""
        self._held.close()


class _SlowReader:
    """Every layer comes when its bytes are due."""

    def __init__(self, reader: Reader, wait: Callable[[int], None]) -> None:
        self._reader = reader
        self._wait = wait

    @property
    def record(self) -> Record:
        return self._reader.record

    def read(self, layer: int, into: Tensor) -> Tensor:
        self._wait(self.record.layer_bytes)
        # as a disk's reader does: into memory that a GPU can be sent from
        np.copyto(into.numpy(), self._reader.read(layer, into).numpy())
        return into

    def close(self) -> None:
        self._reader.close()

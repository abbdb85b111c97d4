"""A tier of a chosen speed: host memory with a bandwidth and a latency."""

import threading
import time
from collections.abc import Callable

import numpy as np
from torch import Tensor

from looseleaf.kv.keys import SegmentKey
from looseleaf.tiers import HostTier, Ledger, Reader, Record, WrappedTier


class ThrottledTier(WrappedTier):
    """Reads ``rate`` bytes/s over all readers, with ``latency`` seconds per record; writes are
    free."""

    def __init__(self, name: str, rate: float, latency: float, num_bytes: int) -> None:
        super().__init__(HostTier(Ledger(num_bytes)), name)
        self.rate = rate
        self.latency = latency
        self._due, self._lock = 0.0, threading.Lock()

    def open(self, key: SegmentKey) -> Reader | None:
        """The record, after the latency."""
        reader = self.tier.open(key)
        if reader is None:
            return None
        time.sleep(self.latency)
        return _SlowReader(reader, self.wait)

    def wait(self, num_bytes: int) -> None:
        """Sleep until ``num_bytes`` more bytes are due."""
        with self._lock:
            self._due = due = max(self._due, time.perf_counter()) + num_bytes / self.rate
        time.sleep(max(0.0, due - time.perf_counter()))


class _SlowReader:
    """A reader that delays every layer until its bytes are due."""

    def __init__(self, reader: Reader, wait: Callable[[int], None]) -> None:
        self._reader = reader
        self._wait = wait

    @property
    def record(self) -> Record:
        return self._reader.record

    def read(self, layer: int, into: Tensor) -> Tensor:
        self._wait(self.record.layer_bytes)
        # copied like a disk's read: into memory that a GPU can transfer
        np.copyto(into.numpy(), self._reader.read(layer, into).numpy())
        return into

    def close(self) -> None:
        self._reader.close()

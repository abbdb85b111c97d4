"""Write-back of segments to the tiers, in the background.

The engine copies a segment from the pool to host memory. One thread writes it to lower tiers in
order, and runs deletions in the same queue. If it can't keep up, segments are skipped; requests
never wait."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxtyping import UInt8
from torch import Tensor

from looseleaf.tiers.guard import Guard
from looseleaf.tiers.stores.arena import Arena
from looseleaf.tiers.stores.base import Record
from looseleaf.tiers.stores.host import HostReader, HostSlot, HostTier
from looseleaf.tiers.transfer.pool_copy import PageExport, PoolCopy

_log = logging.getLogger(__name__)
_MAX_JOBS = 256
# interval of maintenance
_MAINTENANCE_SECONDS = 30.0


@dataclass(eq=False)
class Writer:
    """Writes records to host memory and lower tiers.

    ``skipped`` counts records left out under load. ``maintain`` runs at intervals, also without
    writes."""

    copy: PoolCopy
    staging: Arena
    host: HostTier | None
    lower: Sequence[Guard]
    maintain: Callable[[], None] = lambda: None
    skipped: int = 0
    _jobs: "queue.SimpleQueue[Callable[[], None] | None]" = field(default_factory=queue.SimpleQueue)
    thread: threading.Thread | None = None

    def write_back(self, record: Record, pages: Sequence[int]) -> PageExport | None:
        """Copies a segment out of ``pages`` and queues it; None if skipped. Called by the engine's
        thread."""
        if self._jobs.qsize() >= _MAX_JOBS or not self._has_thread():
            self.skipped += 1
            return None
        slot = self.host.reserve(record) if self.host is not None else None
        if slot is None and not self.lower:
            return None
        run = slot.run if slot is not None else self.staging.allocate(record.num_bytes)
        if run is None:
            self.skipped += 1
            return None
        layers = run.view(record.num_layers, record.layer_bytes)
        copied = self.copy.read(record, pages, layers)
        self.do(lambda: self._write(record, layers, slot, copied))
        return copied

    def do(self, job: Callable[[], None]) -> None:
        """Calls ``job`` after all queued jobs."""
        # the job waits for a thread, because deletions must not be lost
        self._jobs.put(job)
        self._has_thread()

    def flush(self, seconds: float) -> bool:
        """Waits up to ``seconds`` for all queued jobs; returns whether they have ended."""
        flushed = threading.Event()
        if self.thread is None and (self._jobs.empty() or not self._has_thread()):
            return self._jobs.empty()
        self._jobs.put(flushed.set)
        return flushed.wait(seconds)

    def close(self, seconds: float) -> None:
        """Ends the thread after queued jobs, or after ``seconds``."""
        self.flush(seconds)
        self._jobs.put(None)

    def _has_thread(self) -> bool:
        """Starts the thread if need be; returns whether it runs."""
        if self.thread is None:
            name = "looseleaf-write-back"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                # a lack of threads is temporary and no fault of the tiers
                for guard in self.lower:
                    guard.counters.count_fault("unavailable")
                _log.warning(
                    "no thread can be started to write documents to their tiers: %s", error
                )
                return False
            self.thread = thread
        return True

    def _work(self) -> None:
        due = time.monotonic() + _MAINTENANCE_SECONDS
        while True:
            job: Callable[[], None] | None = self.maintain
            if (wait := due - time.monotonic()) > 0:
                try:
                    job = self._jobs.get(timeout=wait)
                except queue.Empty:
                    continue
            else:
                due = time.monotonic() + _MAINTENANCE_SECONDS
            if job is None:
                return
            try:
                job()
            except Exception:
                _log.exception("a segment was not written to its tiers")

    def _write(
        self,
        record: Record,
        layers: UInt8[Tensor, "layers layer_bytes"],
        slot: HostSlot | None,
        copied: PageExport,
    ) -> None:
        copied.wait()
        if not copied.is_valid:
            if slot is not None and self.host is not None:
                self.host.abandon(slot)
            else:
                self.staging.free(layers.view(-1))
            return
        reader: HostReader | None = None
        if slot is not None and self.host is not None:
            reader = self.host.commit(slot)
        try:
            for guard in self.lower:
                start = time.perf_counter()
                if guard.call(lambda tier: tier.put(record, layers), False, writes=True):
                    guard.counters.write_seconds += time.perf_counter() - start
        finally:
            if reader is not None:
                reader.close()
            else:
                self.staging.free(layers.view(-1))

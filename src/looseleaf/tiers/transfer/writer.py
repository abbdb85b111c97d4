"""Segments on their way to the tiers, in the background.

The engine copies a segment out of the pool into memory of the host; one thread brings it on from
there, first in, first out, and also does what must not overtake a write, such as deletions.
When it can't keep up, segments are left out, never waited for."""

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
from looseleaf.tiers.transfer.pool_copy import Copied, PoolCopy

_log = logging.getLogger(__name__)
_MOST_WAITING = 256
# seconds after which the tiers look after themselves, whatever is to be written
_TEND_AFTER = 30.0


@dataclass(eq=False)
class Writer:
    """Brings records to the host's memory and to the tiers below it.

    ``skipped`` counts records that were left out since too much was under way; ``tend`` is called
    now and then, whatever there is to write."""

    copy: PoolCopy
    staging: Arena
    host: HostTier | None
    lower: Sequence[Guard]
    tend: Callable[[], None] = lambda: None
    skipped: int = 0
    _jobs: "queue.SimpleQueue[Callable[[], None] | None]" = field(default_factory=queue.SimpleQueue)
    thread: threading.Thread | None = None

    def keep(self, record: Record, pages: Sequence[int]) -> Copied | None:
        """Copy a segment out of ``pages`` and bring it to the tiers; None if it is left out.

        To be called by the engine's thread."""
        if self._jobs.qsize() >= _MOST_WAITING or not self._has_thread():
            self.skipped += 1
            return None
        slot = self.host.reserve(record) if self.host is not None else None
        if slot is None and not self.lower:
            return None
        run = slot.run if slot is not None else self.staging.take(record.num_bytes)
        if run is None:
            self.skipped += 1
            return None
        layers = run.view(record.num_layers, record.layer_bytes)
        copied = self.copy.read(record, pages, layers)
        self.do(lambda: self._bring(record, layers, slot, copied))
        return copied

    def do(self, job: Callable[[], None]) -> None:
        """Have ``job`` called behind all that was asked for before."""
        # without a thread it waits for one: a deletion must not be lost
        self._jobs.put(job)
        self._has_thread()

    def flush(self, seconds: float) -> bool:
        """Wait until all that was asked for is done, for that long at most; whether it is."""
        done = threading.Event()
        if self.thread is None and (self._jobs.empty() or not self._has_thread()):
            return self._jobs.empty()
        self._jobs.put(done.set)
        return done.wait(seconds)

    def close(self, seconds: float) -> None:
        """Finish what is under way, for that long at most."""
        self.flush(seconds)
        self._jobs.put(None)

    def _has_thread(self) -> bool:
        """Whether there is a thread that writes, or one could be started."""
        if self.thread is None:
            name = "looseleaf-write-back"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                # the system has no more threads, for now: no reason to leave the tiers alone
                for guard in self.lower:
                    guard.counters.count_fault("unavailable")
                _log.warning("no thread to write documents to their tiers with: %s", error)
                return False
            self.thread = thread
        return True

    def _work(self) -> None:
        due = time.monotonic() + _TEND_AFTER
        while True:
            job: Callable[[], None] | None = self.tend
            if (wait := due - time.monotonic()) > 0:
                try:
                    job = self._jobs.get(timeout=wait)
                except queue.Empty:
                    continue
            else:
                due = time.monotonic() + _TEND_AFTER
            if job is None:
                return
            try:
                job()
            except Exception:
                _log.exception("a segment was not written to its tiers")

    def _bring(
        self,
        record: Record,
        layers: UInt8[Tensor, "layers layer_bytes"],
        slot: HostSlot | None,
        copied: Copied,
    ) -> None:
        copied.wait()
        if not copied.whole:
            if slot is not None and self.host is not None:
                self.host.abandon(slot)
            else:
                self.staging.give(layers.view(-1))
            return
        kept: HostReader | None = None
        if slot is not None and self.host is not None:
            kept = self.host.keep(slot)
        try:
            for guard in self.lower:
                begun = time.perf_counter()
                if guard.call(lambda tier: tier.put(record, layers), False, writes=True):
                    guard.counters.write_seconds += time.perf_counter() - begun
        finally:
            if kept is not None:
                kept.close()
            else:
                self.staging.give(layers.view(-1))

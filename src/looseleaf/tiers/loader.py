"""Segments on their way from a tier into pages, layer by layer, in threads of their own.

The loads of one request go together: the first layer of all of them, then the second, so that a
step can follow close behind. What is read is checked before it reaches the pool, so whoever has
waited for a layer has the right one. A load that fails has harmed nothing: its pages are simply not
filled, and nothing writes to them any more."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import UInt8
from torch import Tensor

from looseleaf.tiers.arena import Arena
from looseleaf.tiers.base import Reader, Record, Tier, TierFault
from looseleaf.tiers.guard import Guard
from looseleaf.tiers.host import HostSlot, HostTier
from looseleaf.tiers.pool_copy import PoolCopy

LoadState = Literal["loading", "done", "failed", "cancelled"]


class LoadFailed(Exception):
    """A segment that a step waits for will not come: it has to be computed."""


class Load:
    """One segment on its way into ``pages``. Only the engine's thread waits, cancels and settles.

    ``seconds`` is how long it took, once it ended, from ``queued`` on the clock
    `time.perf_counter`."""

    def __init__(
        self, record: Record, pages: Sequence[int], copy: PoolCopy, guard: Guard, timeout: float
    ) -> None:
        self.record = record
        self.pages = pages
        self.guard = guard
        self.queued = time.perf_counter()
        self.seconds: float | None = None
        self._copy = copy
        self._timeout = timeout
        self._moved = self.queued
        self._state: LoadState = "loading"
        self._layers = 0
        self._events: list[torch.cuda.Event] = []
        # rows of an earlier owner of the pages may not be computed yet
        self._fence = copy.fence()
        self._changed = threading.Condition()

    @property
    def tier(self) -> str:
        """The name of the tier that it comes from."""
        return self.guard.name

    @property
    def state(self) -> LoadState:
        """How far it is; a load without a sign of life for too long has failed."""
        with self._changed:
            self._expire()
            return self._state

    def wait(self, layer: int) -> None:
        """Return when ``layer`` is there, for what is launched next; raises LoadFailed."""
        with self._changed:
            while self._layers <= layer and self._state == "loading":
                self._changed.wait(max(0.0, self._moved + self._timeout - time.perf_counter()))
                self._expire()
            if self._layers <= layer:
                raise LoadFailed(f"a document could not be loaded from the {self.tier} tier")
            event = self._events[layer] if self._events else None
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def wait_for_end(self, seconds: float) -> bool:
        """Wait until it has ended or failed, for that long at most; whether it has."""
        with self._changed:
            self._changed.wait_for(lambda: self._state != "loading", seconds)
        return self.state != "loading"

    def cancel(self) -> None:
        """Nothing is written to the pages any more."""
        with self._changed:
            self._end("cancelled")
        self.settle()

    def settle(self) -> None:
        """On a GPU, what is launched next finds all that was written so far."""
        with self._changed:
            last = self._events[-1] if self._events else None
        if last is not None:
            torch.cuda.current_stream().wait_event(last)

    # what follows is called by the loader's threads

    def deliver(self, layer: int, content: UInt8[Tensor, " layer_bytes"]) -> bool:
        """Bring a layer to the pool; False if nobody wants it any more."""
        with self._changed:
            if self._state != "loading":
                return False
            event = self._copy.write_layer(layer, self.pages, content, self._fence)
            if event is not None:
                self._events.append(event)
            self._layers = layer + 1
            self._moved = time.perf_counter()
            if self._layers == self.record.num_layers:
                self._end("done")
            self._changed.notify_all()
            return True

    def fail(self) -> None:
        """It will not come."""
        with self._changed:
            self._end("failed")

    def event(self, layer: int) -> torch.cuda.Event | None:
        """When a layer that was delivered has left the host's memory, -1 for the last one so far;
        None for at once."""
        with self._changed:
            return self._events[layer] if self._events else None

    def _end(self, state: LoadState) -> None:
        if self._state == "loading":
            self._state = state
            self.seconds = time.perf_counter() - self.queued
            self._changed.notify_all()

    def _expire(self) -> None:
        if self._state == "loading" and time.perf_counter() - self._moved >= self._timeout:
            self._end("failed")
            self.guard.fail(TierFault("timeout", f"nothing came for {self._timeout:g} s"))


@dataclass(eq=False)
class _Opened:
    """A load with its reader, and where its layers pass through."""

    load: Load
    reader: Reader
    slot: HostSlot | None
    run: UInt8[Tensor, " bytes"] | None
    scratch: UInt8[Tensor, "buffers layer_bytes"]

    def room(self, layer: int) -> UInt8[Tensor, " layer_bytes"]:
        """Where a layer may be read to."""
        if self.slot is not None:
            return self.slot.layers[layer]
        buffers = len(self.scratch)
        event = self.load.event(layer - buffers) if layer >= buffers else None
        if event is not None:
            event.synchronize()
        return self.scratch[layer % buffers]


@dataclass(eq=False)
class Loader:
    """Threads that load from one tier. What comes from below the host's memory is kept there too,
    if it is admitted; ``observe`` hears the bytes and the seconds of what was loaded."""

    guard: Guard
    copy: PoolCopy
    staging: Arena
    host: HostTier | None
    timeout: float
    observe: Callable[[int, float], None]
    num_threads: int = 2
    _queues: list["queue.SimpleQueue[list[Load] | None]"] = field(default_factory=list)

    def begin(self, wanted: Sequence[tuple[Record, Sequence[int]]]) -> list[Load]:
        """Load records into pages, all of them layer by layer together."""
        self._start()
        loads = [Load(r, pages, self.copy, self.guard, self.timeout) for r, pages in wanted]
        shares = _dealt([load.record.layer_bytes for load in loads], self.num_threads)
        for share, waiting in zip(shares, self._queues, strict=True):
            if share:
                waiting.put([loads[n] for n in share])
        return loads

    def largest_share(self, num_bytes: Sequence[int]) -> int:
        """Of records of these sizes, how much one thread loads at most."""
        shares = _dealt(num_bytes, self.num_threads)
        return max(sum(num_bytes[n] for n in share) for share in shares)

    def close(self) -> None:
        """End the threads, after what they are loading."""
        for waiting in self._queues:
            waiting.put(None)

    def _start(self) -> None:
        for number in range(len(self._queues), self.num_threads):
            waiting: queue.SimpleQueue[list[Load] | None] = queue.SimpleQueue()
            name = f"looseleaf-{self.guard.name}-{number}"
            threading.Thread(target=self._work, args=(waiting,), name=name, daemon=True).start()
            self._queues.append(waiting)

    def _work(self, waiting: "queue.SimpleQueue[list[Load] | None]") -> None:
        while (loads := waiting.get()) is not None:
            begun = time.perf_counter()
            opened = [one for load in loads if (one := self._open(load)) is not None]
            num_bytes = sum(self._read(opened, layer) for layer in range(_depth(opened)))
            well = [one for one in opened if one.load.state == "done"]
            for one in opened:
                self._close(one)
            if well:
                seconds = time.perf_counter() - begun
                counters = self.guard.counters
                counters.loads += len(well)
                counters.bytes_read += num_bytes
                counters.seconds += seconds
                self.guard.breaker.book(well=True)
                self.observe(num_bytes, seconds)

    def _open(self, load: Load) -> _Opened | None:
        if load.state != "loading":
            return None

        def act(tier: Tier) -> Reader:
            reader = tier.open(load.record.key)
            if reader is None:
                raise TierFault("missing", "the record is gone")
            if not _fits(reader.record, load.record):
                reader.close()
                raise TierFault("unfit", "the record has another shape than the pool")
            return reader

        reader = self.guard.call(act, None, proof=False)
        if reader is None:
            load.fail()
            return None
        size, slot, run = load.record.layer_bytes, None, None
        if self.host is not None and self.guard.name != self.host.name:
            slot = self.host.reserve(reader.record)
        if slot is None:
            run = self.staging.take(2 * size)
        scratch = torch.empty(2 * size, dtype=torch.uint8) if run is None else run
        return _Opened(load, reader, slot, run, scratch.view(2, size))

    def _read(self, opened: list[_Opened], layer: int) -> int:
        """Bring one layer of all loads; returns its bytes."""
        num_bytes = 0
        for one in opened:
            if one.load.state != "loading":
                continue
            try:
                content = one.reader.read(layer, one.room(layer))
                num_bytes += one.load.record.layer_bytes * one.load.deliver(layer, content)
            except Exception as error:
                self.guard.fail(error)
                one.load.fail()
        return num_bytes

    def _close(self, one: _Opened) -> None:
        last = one.load.event(-1)
        if last is not None:
            last.synchronize()
        one.reader.close()
        if one.run is not None:
            self.staging.give(one.run)
        if one.slot is not None and self.host is not None:
            if one.load.state == "done":
                kept = self.host.keep(one.slot)
                if kept is not None:
                    kept.close()
            else:
                self.host.abandon(one.slot)


def _dealt(sizes: Sequence[int], num_hands: int) -> list[list[int]]:
    """Numbers of records for each of some threads: the longest first, to the one that has least."""
    shares: list[list[int]] = [[] for _ in range(num_hands)]
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        min(shares, key=lambda share: sum(sizes[n] for n in share)).append(number)
    return shares


def _depth(opened: Sequence[_Opened]) -> int:
    return max((one.load.record.num_layers for one in opened), default=0)


def _fits(found: Record, wanted: Record) -> bool:
    same = (found.length, found.num_layers) == (wanted.length, wanted.num_layers)
    return same and (found.layer_shape, found.dtype) == (wanted.layer_shape, wanted.dtype)

"""Segments on their way from a tier into pages, layer by layer, in threads of their own.

The loads of one request go together: the first layer of all of them, then the second, so that a
step can follow close behind. What is read is checked before it reaches the pool, so whoever has
waited for a layer has the right one. A load that fails has harmed nothing: its pages are simply not
filled, and nothing writes to them any more."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from jaxtyping import UInt8
from torch import Tensor

from looseleaf.tiers.arena import Arena
from looseleaf.tiers.base import Reader, Record, Tier, TierFault
from looseleaf.tiers.guard import Guard
from looseleaf.tiers.host import HostReader, HostSlot, HostTier
from looseleaf.tiers.load import Load, send
from looseleaf.tiers.pool_copy import PoolCopy, Source


@dataclass(frozen=True)
class _Portions:
    """How much is copied to a GPU at a time: of all documents the ``first`` that a step can begin
    with, then a ``second`` that comes while it is planned, so that ``at_once`` is asked for at
    once; then ``one`` document's layers, or None for as many of all as go ``together``, and so much
    together; in bytes. And how many such copies are asked for ``ahead``."""

    first: int
    second: int
    at_once: int
    one: int | None
    together: int
    ahead: int


_PLAIN = _Portions(26 << 20, 52 << 20, 64 << 20, 6 << 20, 18 << 20, 2)
# a kernel behind each copy: to launch it takes as long as to ask for six copies
_PACKED = _Portions(30 << 20, 40 << 20, 60 << 20, None, 48 << 20, 1)


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


class _Parcel(NamedTuple):
    """What was asked for in one copy: its bytes, and when it is there, if anybody wants it."""

    num_bytes: int
    event: torch.cuda.Event | None


@dataclass(eq=False)
class _Sending:
    """Loads whose layers are copied to a GPU, from ``begun`` on: each of ``parcels`` is asked for
    when it is taken from there, by the thread that loads or by whoever waits for a layer. Those
    ``apart`` are read behind them. Those that are packed are written by ``targets``."""

    opened: list[_Opened]
    apart: list[_Opened]
    parcels: Iterator[_Parcel]
    portions: _Portions
    begun: float
    num_bytes: int = 0
    under_way: deque[torch.cuda.Event] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self) -> bool:
        """Ask for one more; False if there is none."""
        with self._lock:
            parcel = next(self.parcels, None)
            if parcel is None:
                return False
            self.num_bytes += parcel.num_bytes
            if parcel.event is not None:
                self.under_way.append(parcel.event)
            return True

    def ask_for_rest(self) -> None:
        """Ask for all others that nobody asks for who waits."""
        while True:
            # copies of another stream may wait as long as there is any of these: until a step
            # follows, it is one by one. One that is replayed asks for all itself, in less time than
            # they take; beside one that is launched some are asked for ahead
            launched = any(one.load.launched for one in self.opened)
            while len(self.under_way) > (self.portions.ahead if launched else 0):
                self.under_way.popleft().synchronize()
            if not self.ask():
                return


@dataclass(eq=False)
class Loader:
    """Threads that load from one tier. What comes from below the host's memory is kept there too,
    if it is admitted; ``observe`` hears the bytes and the seconds of what was loaded, whether that
    was beside a pass whose kernels were launched one by one, and how many threads loaded."""

    guard: Guard
    copy: PoolCopy
    staging: Arena
    host: HostTier | None
    timeout: float
    observe: Callable[[int, float, bool, int], None]
    num_threads: int = 2
    threads: list[threading.Thread] = field(default_factory=list)
    _queues: list["queue.SimpleQueue[list[Load] | _Sending | None]"] = field(default_factory=list)
    _held: list[_Sending] = field(default_factory=list)
    _closing: bool = False
    # for what is read in place
    _no_room: Tensor = field(default_factory=lambda: torch.empty((2, 0), dtype=torch.uint8))

    def begin(self, wanted: Sequence[tuple[Record, Sequence[int]]]) -> list[Load]:
        """Load records into pages, all of them layer by layer together."""
        self._start()
        about = self.copy, self.guard, self.timeout, self.copy.fence()
        loads = [Load(record, pages, *about) for record, pages in wanted]
        shares = self._shares([load.record.layer_bytes for load in loads])
        hands = sum(map(bool, shares))
        for load in loads:
            load.hands = hands
        for share, waiting in zip(shares, self._queues, strict=True):
            mine = [loads[n] for n in share]
            if mine and self._by_copies:
                sending = self._begin_copies(mine)
                # what is read apart only the thread brings
                if sending.apart:
                    waiting.put(sending)
                else:
                    self._held.append(sending)
            elif mine:
                waiting.put(mine)
        return loads

    def wake(self) -> None:
        """Have the thread go on with what only the first copies of were asked for; to be called
        soon behind `begin`, when what is urgent is launched: a thread that wakes takes the
        interpreter from the one that plans."""
        for sending in self._held:
            self._queues[0].put(sending)
        self._held.clear()

    def largest_share(self, num_bytes: Sequence[int]) -> tuple[int, int]:
        """Of records of these sizes, how much comes one behind the other at most, and how many
        threads bring some."""
        shares = self._shares(num_bytes)
        most = max(sum(num_bytes[n] for n in share) for share in shares)
        return most, max(1, sum(map(bool, shares)))

    def _shares(self, sizes: Sequence[int]) -> list[list[int]]:
        """Which of records of these sizes each thread brings."""
        return _dealt(sizes, self.num_hands) + [[]] * (self.num_threads - self.num_hands)

    @property
    def num_hands(self) -> int:
        """How many threads load at the same time."""
        # from the host's memory to a GPU there is one way, and copies are only asked for
        return 1 if self._by_copies else self.num_threads

    @property
    def _by_copies(self) -> bool:
        return self.copy.on_gpu and isinstance(self.guard.tier, HostTier)

    def close(self) -> None:
        """End the threads; what they are loading fails."""
        self._closing = True
        self.wake()
        for waiting in self._queues:
            waiting.put(None)

    def _start(self) -> None:
        for number in range(len(self._queues), self.num_threads):
            waiting: queue.SimpleQueue[list[Load] | _Sending | None] = queue.SimpleQueue()
            name = f"looseleaf-{self.guard.name}-{number}"
            thread = threading.Thread(target=self._work, args=(waiting,), name=name, daemon=True)
            thread.start()
            self.threads.append(thread)
            self._queues.append(waiting)

    def _work(self, waiting: "queue.SimpleQueue[list[Load] | _Sending | None]") -> None:
        while (job := waiting.get()) is not None:
            try:
                self._bring(job)
            except Exception as error:
                # whatever it is: a thread that ends would leave all later loads waiting
                self.guard.fail(error)
                loads = [o.load for o in job.opened] if isinstance(job, _Sending) else job
                for load in loads:
                    load.fail()

    def _bring(self, job: list[Load] | _Sending) -> None:
        if isinstance(job, _Sending):
            begun, opened = job.begun, job.opened
            job.ask_for_rest()
            num_bytes = job.num_bytes + self._read_all(job.apart)
        else:
            begun = time.perf_counter()
            opened = [one for load in job if (one := self._open(load)) is not None]
            num_bytes = self._read_all(opened)
        for one in opened:
            self._close(one)
        well = [one for one in opened if one.load.state == "done"]
        if well:
            seconds = time.perf_counter() - begun
            counters = self.guard.counters
            counters.loads += len(well)
            counters.bytes_read += num_bytes
            counters.seconds += seconds
            self.guard.breaker.book(well=True)
            launched = any(one.load.launched for one in well)
            self.observe(num_bytes, seconds, launched, well[0].load.hands)

    def _open(self, load: Load) -> _Opened | None:
        if self._given_up(load):
            return None

        def act(tier: Tier) -> Reader:
            reader = tier.open(load.record.key)
            if reader is None:
                raise TierFault("missing", "the record is gone")
            if not self._fits(reader.record, load.record):
                reader.close()
                raise TierFault("unfit", "the record has another shape than the pool")
            return reader

        reader = self.guard.call(act, None, proof=False)
        if reader is None:
            load.fail()
            return None
        # it may be packed or not, whatever this pool does
        load.record = reader.record
        if isinstance(reader, HostReader):
            return _Opened(load, reader, None, None, self._no_room)
        size, slot, run = load.record.layer_bytes, None, None
        if self.host is not None and self.guard.name != self.host.name:
            slot = self.host.reserve(reader.record)
        if slot is None:
            run = self.staging.take(2 * size)
        scratch = torch.empty(2 * size, dtype=torch.uint8) if run is None else run
        return _Opened(load, reader, slot, run, scratch.view(2, size))

    def _fits(self, found: Record, wanted: Record) -> bool:
        """Whether a record is what is wanted, packed as this version does it or not."""
        num_pages = wanted.layer_shape[1]
        size = self.copy.layer_bytes(num_pages, packed=found.packed)
        return found == replace(wanted, tenant=found.tenant, packed=found.packed, layer_bytes=size)

    def _read_all(self, opened: list[_Opened]) -> int:
        """Bring all layers of all loads, the first ones first; returns their bytes."""
        return sum(self._read(opened, layer) for layer in range(_depth(opened)))

    def _read(self, opened: list[_Opened], layer: int) -> int:
        """Bring one layer of all loads; returns its bytes."""
        num_bytes = 0
        for one in opened:
            if self._given_up(one.load):
                continue
            try:
                content = one.reader.read(layer, one.room(layer))
                num_bytes += content.numel() * one.load.deliver(layer, content[None])
            except Exception as error:
                self.guard.fail(error)
                one.load.fail()
        return num_bytes

    def _given_up(self, load: Load) -> bool:
        """Whether nobody wants any more of a load."""
        if self._closing:
            load.fail()
        return load.state != "loading"

    def _begin_copies(self, loads: Sequence[Load]) -> _Sending:
        """Ask for the first layers at once: until a thread wakes, a step may be half planned, and
        both would wait for the interpreter."""
        begun = time.perf_counter()
        opened = [one for load in loads if (one := self._open(load)) is not None]
        runs = {one.load: self.copy.run_of(one.load.pages) for one in opened}
        apart = [one for one in opened if runs[one.load] is None]
        sources = {
            one.load: Source(run, one.reader.address, one.load.record.packed)
            for one in opened
            if (run := runs[one.load]) is not None and isinstance(one.reader, HostReader)
        }
        portions, parcels = _portions(list(sources)), self._send(sources)
        sending = _Sending(opened, apart, parcels, portions, begun)
        for load in sources:
            load.ask = sending.ask
        while sending.num_bytes < portions.at_once and sending.ask():
            pass
        return sending

    def _send(self, sources: dict[Load, Source]) -> Iterator[_Parcel]:
        """Bring all layers of loads from the host's memory to a GPU, in few copies, each asked for
        when it is taken from here."""
        for layers, some in _parcels(list(sources)):
            some = [load for load in some if not self._given_up(load)]

            def write(loads: list[Load], layers: range = layers) -> torch.cuda.Event:
                fences = {x.fence for x in loads if x.fence is not None}
                behind = [] if layers.start else list(fences)
                return self.copy.write_from(layers, [sources[x] for x in loads], behind)

            try:
                sent, event = send(some, layers, write)
            except Exception as error:
                self.guard.fail(error)
                for load in some:
                    load.fail()
                continue
            asked = sum(load.record.layer_bytes for load in sent) * len(layers)
            yield _Parcel(asked, event)

    def _close(self, one: _Opened) -> None:
        last = one.load.event(-1)
        if last is not None:
            last.synchronize()
        one.load.arrived()
        try:
            one.reader.close()
        except Exception as error:
            self.guard.fail(error)
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
    if num_hands == 1:
        return [sorted(range(len(sizes)), key=lambda n: -sizes[n])]
    shares: list[list[int]] = [[] for _ in range(num_hands)]
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        min(shares, key=lambda share: sum(sizes[n] for n in share)).append(number)
    return shares


def _parcels(loads: Sequence[Load]) -> Iterator[tuple[range, list[Load]]]:
    """Layers and loads that are sent together, in the order in which a step wants them.

    A copy costs its asking, so of short documents several layers go at a time. The first few are
    asked for at once, and a step waits for them; the last layers go one by one, since a step still
    has to compute them."""
    start, num_layers = 0, max((load.record.num_layers for load in loads), default=0)
    sizes = [load.record.layer_bytes for load in loads] or [1]
    portions = _portions(loads)
    while start < num_layers:
        soon = start * sum(sizes) < portions.at_once
        together = portions.second if start else portions.first
        if soon or portions.one is None:
            most = (together if soon else portions.together) // sum(sizes)
        else:
            most = portions.one // max(sizes)
        layers = range(start, start + max(1, min((num_layers - start) // 2, most)))
        at_a_time = max(1, portions.together // (max(sizes) * len(layers)))
        at_a_time = len(loads) if most and soon else at_a_time
        for first in range(0, len(loads), at_a_time):
            yield layers, list(loads[first : first + at_a_time])
        start = layers.stop


def _portions(loads: Sequence[Load]) -> _Portions:
    return _PACKED if loads and all(load.record.packed for load in loads) else _PLAIN


def _depth(opened: Sequence[_Opened]) -> int:
    return max((one.load.record.num_layers for one in opened), default=0)

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
from functools import partial

import torch
from jaxtyping import UInt8
from torch import Tensor

from looseleaf.tiers.guard import Guard
from looseleaf.tiers.stores.arena import Arena
from looseleaf.tiers.stores.base import Reader, Record, Tier, TierFault
from looseleaf.tiers.stores.host import HostReader, HostSlot, HostTier
from looseleaf.tiers.transfer.copy_batches import parcels_of
from looseleaf.tiers.transfer.copy_engine import Order, Source
from looseleaf.tiers.transfer.load import Line, Load
from looseleaf.tiers.transfer.pool_copy import PoolCopy

_GLANCE_SECONDS = 0.1


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


@dataclass
class _Copies:
    """Loads from the host's memory to a GPU, from ``begun`` on: what is ``ordered``, and those
    ``apart``, which are read behind it."""

    opened: list[_Opened]
    apart: list[_Opened]
    order: Order | None
    begun: float


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
    _queues: list["queue.SimpleQueue[list[Load] | _Copies | None]"] = field(default_factory=list)
    _lines: list[Line] = field(default_factory=list)
    _held: list[_Copies] = field(default_factory=list)
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
        for share, waiting, line in zip(shares, self._queues, self._lines, strict=True):
            mine = [loads[n] for n in share]
            for load in mine:
                load.line = line
            if mine and self._by_copies:
                copies = self._begin_copies(mine)
                # what is read apart only the thread brings
                if copies.apart:
                    waiting.put(copies)
                else:
                    self._held.append(copies)
            elif mine:
                waiting.put(mine)
        return loads

    def wake(self) -> None:
        """Have the thread see to the end of what is ordered; to be called soon behind `begin`, when
        what is urgent is launched: a thread that wakes takes the interpreter from the one that
        plans."""
        for copies in self._held:
            self._queues[0].put(copies)
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
            waiting: queue.SimpleQueue[list[Load] | _Copies | None] = queue.SimpleQueue()
            name, line = f"looseleaf-{self.guard.name}-{number}", Line()
            work = partial(self._work, waiting, line)
            thread = threading.Thread(target=work, name=name, daemon=True)
            thread.start()
            self.threads.append(thread)
            self._queues.append(waiting)
            self._lines.append(line)

    def _work(self, waiting: "queue.SimpleQueue[list[Load] | _Copies | None]", line: Line) -> None:
        while (job := waiting.get()) is not None:
            line.moved = time.perf_counter()
            try:
                self._bring(job)
            except Exception as error:
                # whatever it is: a thread that ends would leave all later loads waiting
                self.guard.fail(error)
                loads = [o.load for o in job.opened] if isinstance(job, _Copies) else job
                for load in loads:
                    load.fail()

    def _bring(self, job: list[Load] | _Copies) -> None:
        if isinstance(job, _Copies):
            begun, opened = job.begun, job.opened
            num_bytes = self._await(job) + self._read_all(job.apart)
        else:
            begun = time.perf_counter()
            # one by one: of a tier that fails the others may be there
            opened = [one for load in job for one in self._open([load])]
            num_bytes = self._read_all(opened)
        for one in opened:
            self._close(one)
        if isinstance(job, _Copies) and job.order is not None:
            job.order.close()
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

    def _open(self, loads: Sequence[Load]) -> list[_Opened]:
        """Those of some loads whose records are there; the others have failed."""
        wanted = [load for load in loads if not self._given_up(load)]

        def act(tier: Tier) -> list[Reader | TierFault | None]:
            return [self._find(tier, load.record) for load in wanted]

        gone: list[Reader | TierFault | None] = [None] * len(wanted)
        opened = []
        for load, reader in zip(wanted, self.guard.call(act, gone, proof=False), strict=True):
            if reader is None or isinstance(reader, TierFault):
                if reader is not None:
                    self.guard.fail(reader)
                load.fail()
            else:
                opened.append(self._opened(load, reader))
        return opened

    def _find(self, tier: Tier, wanted: Record) -> Reader | TierFault:
        reader = tier.open(wanted.key)
        if reader is None:
            return TierFault("missing", "the record is gone")
        if not self._fits(reader.record, wanted):
            reader.close()
            return TierFault("unfit", "the record has another shape than the pool")
        return reader

    def _opened(self, load: Load, reader: Reader) -> _Opened:
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
        same = (found.length, found.num_layers) == (wanted.length, wanted.num_layers)
        same = same and (found.layer_shape, found.dtype) == (wanted.layer_shape, wanted.dtype)
        size = self.copy.layer_bytes(wanted.layer_shape[1], packed=found.packed)
        return same and found.layer_bytes == size

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

    def _begin_copies(self, loads: Sequence[Load]) -> _Copies:
        """Order what can come by copies, before a thread of Python wakes."""
        begun = time.perf_counter()
        opened = self._open(loads)
        ordered, sources, apart = list[Load](), list[Source](), list[_Opened]()
        for one in opened:
            packed = one.load.record.packed
            run = self.copy.run_of(one.load.pages, packed=packed)
            if run is None or not isinstance(one.reader, HostReader):
                apart.append(one)
                continue
            ordered.append(one.load)
            sources.append(Source(run, one.reader.address, packed))
        order = self._order(ordered, sources) if ordered else None
        return _Copies(opened, apart, order, begun)

    def _order(self, loads: Sequence[Load], sources: Sequence[Source]) -> Order:
        """Have loads brought by the copy's courier."""
        assert self.copy.courier is not None, "a run is what it brings"
        sizes = tuple(load.record.layer_bytes for load in loads)
        packed = all(source.packed for source in sources)
        parcels = parcels_of(sizes, loads[0].record.num_layers, packed=packed)
        order = self.copy.courier.order(sources, parcels, loads[0].fence)
        for number, load in enumerate(loads):
            load.follow(order, number)
        return order

    def _await(self, copies: _Copies) -> int:
        """Wait until all that is ordered was asked for; returns its bytes."""
        order = copies.order
        if order is None:
            return 0
        while not order.wait_for_end(_GLANCE_SECONDS):
            for one in copies.opened if self._closing else ():
                one.load.fail()
        if order.failed:
            self.guard.fail(order.error)
        for one in copies.opened:
            one.load.look()
        return order.num_bytes

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
                self._keep(one.slot, self.host)
            else:
                self.host.abandon(one.slot)

    def _keep(self, slot: HostSlot, host: HostTier) -> None:
        """Keep what has come in the host's memory, unless it was deleted on its way."""
        key = slot.record.key
        host.keep(slot).close()
        # asked behind it: what is deleted from now on is found in the host's memory as well
        if not self.guard.call(lambda tier: tier.contains([key])[0], False, proof=False):
            host.delete([key])


def _dealt(sizes: Sequence[int], num_hands: int) -> list[list[int]]:
    """Numbers of records for each of some threads: the longest first, to the one that has least."""
    if num_hands == 1:
        return [sorted(range(len(sizes)), key=lambda n: -sizes[n])]
    shares: list[list[int]] = [[] for _ in range(num_hands)]
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        min(shares, key=lambda share: sum(sizes[n] for n in share)).append(number)
    return shares


def _depth(opened: Sequence[_Opened]) -> int:
    return max((one.load.record.num_layers for one in opened), default=0)

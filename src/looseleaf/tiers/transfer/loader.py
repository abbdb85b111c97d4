"""Threads that load segments from a tier into pages, layer by layer.

The loads of one request advance together: the first layer of all, then the second, so that a step
can follow. Content is checked before it reaches the pool, so a layer that has arrived is correct. A
failed load leaves its pages unfilled and writes nothing later."""

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
from looseleaf.tiers.transfer.copy_batches import make_schedule
from looseleaf.tiers.transfer.copy_engine import Source, Transfer
from looseleaf.tiers.transfer.load import Heartbeat, Load
from looseleaf.tiers.transfer.pool_copy import PoolCopy

_POLL_SECONDS = 0.1


@dataclass(eq=False)
class _OpenLoad:
    """A load with its reader and buffers."""

    load: Load
    reader: Reader
    slot: HostSlot | None
    run: UInt8[Tensor, " bytes"] | None
    scratch: UInt8[Tensor, "buffers layer_bytes"]

    def buffer(self, layer: int) -> UInt8[Tensor, " layer_bytes"]:
        """The buffer of a layer, free once its previous layer has left."""
        if self.slot is not None:
            return self.slot.layers[layer]
        buffers = len(self.scratch)
        event = self.load.event(layer - buffers) if layer >= buffers else None
        if event is not None:
            event.synchronize()
        return self.scratch[layer % buffers]


@dataclass
class _DeviceLoads:
    """Loads from host memory to a GPU since ``start_time``: those of ``transfer``, and ``separate``
    ones that are read afterwards."""

    open_loads: list[_OpenLoad]
    separate: list[_OpenLoad]
    transfer: Transfer | None
    start_time: float


@dataclass(eq=False)
class Loader:
    """Threads that load from one tier.

    Content from lower tiers is also stored in host memory, if admitted. ``observe`` receives the
    bytes and seconds of a load, whether a pass launched its kernels one by one meanwhile, and the
    worker count."""

    guard: Guard
    copy: PoolCopy
    staging: Arena
    host: HostTier | None
    timeout: float
    observe: Callable[[int, float, bool, int], None]
    num_threads: int = 2
    threads: list[threading.Thread] = field(default_factory=list)
    _queues: list["queue.SimpleQueue[list[Load] | _DeviceLoads | None]"] = field(
        default_factory=list
    )
    _heartbeats: list[Heartbeat] = field(default_factory=list)
    _pending: list[_DeviceLoads] = field(default_factory=list)
    _closing: bool = False
    # for readers that return their own memory
    _no_buffer: Tensor = field(default_factory=lambda: torch.empty((2, 0), dtype=torch.uint8))

    def begin(self, targets: Sequence[tuple[Record, Sequence[int]]]) -> list[Load]:
        """Starts loading records into pages, layer by layer together."""
        self._start()
        fence = self.copy.fence()
        loads = [
            Load(record, pages, self.copy, self.guard, self.timeout, fence)
            for record, pages in targets
        ]
        shares = self._shares([load.record.layer_bytes for load in loads])
        workers = sum(map(bool, shares))
        for load in loads:
            load.workers = workers
        for share, jobs, heartbeat in zip(shares, self._queues, self._heartbeats, strict=True):
            own_loads = [loads[n] for n in share]
            for load in own_loads:
                load.heartbeat = heartbeat
            if own_loads and self._uses_copy_engine:
                copies = self._begin_copies(own_loads)
                # only the thread reads separate loads
                if copies.separate:
                    jobs.put(copies)
                else:
                    self._pending.append(copies)
            elif own_loads:
                jobs.put(own_loads)
        return loads

    def wake(self) -> None:
        """Wakes the thread that completes submitted transfers.

        Called after the step is launched, because a waking thread competes with its planning for
        the interpreter."""
        for copies in self._pending:
            self._queues[0].put(copies)
        self._pending.clear()

    def largest_share(self, num_bytes: Sequence[int]) -> tuple[int, int]:
        """Bytes of the largest share of records of these sizes, and the number of shares."""
        shares = self._shares(num_bytes)
        most = max(sum(num_bytes[n] for n in share) for share in shares)
        return most, max(1, sum(map(bool, shares)))

    def _shares(self, sizes: Sequence[int]) -> list[list[int]]:
        """Record numbers for each thread."""
        return _partition(sizes, self.num_workers) + [[]] * (self.num_threads - self.num_workers)

    @property
    def num_workers(self) -> int:
        """The number of threads that load at the same time."""
        # one link leads from host memory to a GPU, and submissions are cheap
        return 1 if self._uses_copy_engine else self.num_threads

    @property
    def _uses_copy_engine(self) -> bool:
        return self.copy.on_gpu and isinstance(self.guard.tier, HostTier)

    def close(self) -> None:
        """Ends the threads; running loads fail."""
        self._closing = True
        self.wake()
        for jobs in self._queues:
            jobs.put(None)

    def _start(self) -> None:
        for number in range(len(self._queues), self.num_threads):
            jobs: queue.SimpleQueue[list[Load] | _DeviceLoads | None] = queue.SimpleQueue()
            name, heartbeat = f"looseleaf-{self.guard.name}-{number}", Heartbeat()
            work = partial(self._work, jobs, heartbeat)
            thread = threading.Thread(target=work, name=name, daemon=True)
            thread.start()
            self.threads.append(thread)
            self._queues.append(jobs)
            self._heartbeats.append(heartbeat)

    def _work(
        self, jobs: "queue.SimpleQueue[list[Load] | _DeviceLoads | None]", heartbeat: Heartbeat
    ) -> None:
        while (job := jobs.get()) is not None:
            heartbeat.time = time.perf_counter()
            try:
                self._run(job)
            except Exception as error:
                # a thread that ends would block all later loads
                self.guard.fail(error)
                loads = (
                    [item.load for item in job.open_loads] if isinstance(job, _DeviceLoads) else job
                )
                for load in loads:
                    load.fail()

    def _run(self, job: list[Load] | _DeviceLoads) -> None:
        if isinstance(job, _DeviceLoads):
            start_time, open_loads = job.start_time, job.open_loads
            num_bytes = self._wait_for_transfer(job) + self._read_all(job.separate)
        else:
            start_time = time.perf_counter()
            # one by one, because later records may be sound
            open_loads = [item for load in job for item in self._open([load])]
            num_bytes = self._read_all(open_loads)
        for item in open_loads:
            self._close(item)
        if isinstance(job, _DeviceLoads) and job.transfer is not None:
            job.transfer.close()
        complete = [item for item in open_loads if item.load.state == "done"]
        if complete:
            seconds = time.perf_counter() - start_time
            counters = self.guard.counters
            counters.loads += len(complete)
            counters.bytes_read += num_bytes
            counters.seconds += seconds
            self.guard.breaker.record(well=True)
            launched = any(item.load.launched for item in complete)
            self.observe(num_bytes, seconds, launched, complete[0].load.workers)

    def _open(self, loads: Sequence[Load]) -> list[_OpenLoad]:
        """Opens records; loads without a record fail."""
        active = [load for load in loads if not self._is_abandoned(load)]

        def act(tier: Tier) -> list[Reader | TierFault | None]:
            return [self._find(tier, load.record) for load in active]

        missing: list[Reader | TierFault | None] = [None] * len(active)
        open_loads = []
        for load, reader in zip(active, self.guard.call(act, missing, proof=False), strict=True):
            if reader is None or isinstance(reader, TierFault):
                if reader is not None:
                    self.guard.fail(reader)
                load.fail()
            else:
                open_loads.append(self._prepare(load, reader))
        return open_loads

    def _find(self, tier: Tier, expected: Record) -> Reader | TierFault:
        reader = tier.open(expected.key)
        if reader is None:
            return TierFault("missing", "the record is gone")
        if not self._fits(reader.record, expected):
            reader.close()
            return TierFault("unfit", "the record has another shape than the pool")
        return reader

    def _prepare(self, load: Load, reader: Reader) -> _OpenLoad:
        # the record may be packed even if this pool packs none
        load.record = reader.record
        if isinstance(reader, HostReader):
            return _OpenLoad(load, reader, None, None, self._no_buffer)
        size, slot, run = load.record.layer_bytes, None, None
        if self.host is not None and self.guard.name != self.host.name:
            slot = self.host.reserve(reader.record)
        if slot is None:
            run = self.staging.allocate(2 * size)
        scratch = torch.empty(2 * size, dtype=torch.uint8) if run is None else run
        return _OpenLoad(load, reader, slot, run, scratch.view(2, size))

    def _fits(self, stored: Record, expected: Record) -> bool:
        """Whether a record has the expected shape, packed or not."""
        return (
            stored.length == expected.length
            and stored.num_layers == expected.num_layers
            and stored.layer_shape == expected.layer_shape
            and stored.dtype == expected.dtype
            and stored.layer_bytes
            == self.copy.layer_bytes(expected.layer_shape[1], packed=stored.packed)
        )

    def _read_all(self, open_loads: list[_OpenLoad]) -> int:
        """Reads all layers of all loads, first layers first; returns their bytes."""
        return sum(self._read(open_loads, layer) for layer in range(_max_layers(open_loads)))

    def _read(self, open_loads: list[_OpenLoad], layer: int) -> int:
        """Reads one layer of all loads; returns its bytes."""
        num_bytes = 0
        for item in open_loads:
            if self._is_abandoned(item.load):
                continue
            try:
                content = item.reader.read(layer, item.buffer(layer))
                num_bytes += content.numel() * item.load.deliver(layer, content[None])
            except Exception as error:
                self.guard.fail(error)
                item.load.fail()
        return num_bytes

    def _is_abandoned(self, load: Load) -> bool:
        """Whether a load has ended, in any way."""
        if self._closing:
            load.fail()
        return load.state != "loading"

    def _begin_copies(self, loads: Sequence[Load]) -> _DeviceLoads:
        """Submits copies before a Python thread wakes."""
        start_time = time.perf_counter()
        open_loads = self._open(loads)
        transferred, sources, separate = list[Load](), list[Source](), list[_OpenLoad]()
        for item in open_loads:
            packed = item.load.record.packed
            run = self.copy.run_of(item.load.pages, packed=packed)
            if run is None or not isinstance(item.reader, HostReader):
                separate.append(item)
                continue
            transferred.append(item.load)
            sources.append(Source(run, item.reader.address, packed))
        transfer = self._submit(transferred, sources) if transferred else None
        return _DeviceLoads(open_loads, separate, transfer, start_time)

    def _submit(self, loads: Sequence[Load], sources: Sequence[Source]) -> Transfer:
        """Submits loads to the copy engine."""
        assert self.copy.copy_engine is not None, "page runs exist only with a copy engine"
        sizes = tuple(load.record.layer_bytes for load in loads)
        packed = all(source.packed for source in sources)
        schedule = make_schedule(sizes, loads[0].record.num_layers, packed=packed)
        transfer = self.copy.copy_engine.submit(sources, schedule, loads[0].fence)
        for number, load in enumerate(loads):
            load.attach(transfer, number)
        return transfer

    def _wait_for_transfer(self, copies: _DeviceLoads) -> int:
        """Waits until all batches are submitted; returns their bytes."""
        transfer = copies.transfer
        if transfer is None:
            return 0
        while not transfer.wait_for_end(_POLL_SECONDS):
            for item in copies.open_loads if self._closing else ():
                item.load.fail()
        if transfer.failed:
            self.guard.fail(transfer.error)
        for item in copies.open_loads:
            item.load.refresh()
        return transfer.num_bytes

    def _close(self, item: _OpenLoad) -> None:
        last = item.load.event(-1)
        if last is not None:
            last.synchronize()
        item.load.record_arrival()
        try:
            item.reader.close()
        except Exception as error:
            self.guard.fail(error)
        if item.run is not None:
            self.staging.free(item.run)
        if item.slot is not None and self.host is not None:
            if item.load.state == "done":
                self._keep(item.slot, self.host)
            else:
                self.host.abandon(item.slot)

    def _keep(self, slot: HostSlot, host: HostTier) -> None:
        """Stores a loaded record in host memory, unless it was deleted meanwhile."""
        key = slot.record.key
        host.commit(slot).close()
        # after the commit, so that later deletions find it in host memory
        if not self.guard.call(lambda tier: tier.contains([key])[0], False, proof=False):
            host.delete([key])


def _partition(sizes: Sequence[int], num_workers: int) -> list[list[int]]:
    """Record numbers for each worker: longest first, to the worker with the fewest bytes."""
    if num_workers == 1:
        return [sorted(range(len(sizes)), key=lambda n: -sizes[n])]
    shares: list[list[int]] = [[] for _ in range(num_workers)]
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        min(shares, key=lambda share: sum(sizes[n] for n in share)).append(number)
    return shares


def _max_layers(open_loads: Sequence[_OpenLoad]) -> int:
    return max((item.load.record.num_layers for item in open_loads), default=0)

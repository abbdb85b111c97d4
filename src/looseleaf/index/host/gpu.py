"""Decode rows' reads of host-resident segments on a GPU: queries down, states up, within a stream.

A layer is a copy down, a signal to a waiting thread, its reply and a copy up. All run on a stream
beside the pool's reads, so GPU and CPU work concurrently, the merge waits for both, and a graph can
capture it. Prompt rows read the keys themselves, tile by tile (`looseleaf.index.host.attend`).
"""

import ctypes
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor

from looseleaf.errors import EngineFault
from looseleaf.index.host.attend import HostedCounters, HostedRead
from looseleaf.index.host.segment import HostedSegment
from looseleaf.index.host.window import WindowRow
from looseleaf.index.host.work import HostedWork, PlaceTables
from looseleaf.index.host_threads import HostThreads, StreamSignal
from looseleaf.rope import map_distinct
from looseleaf.types import AttnState, Rotation, ScoreRule

# from this many threads on, one is left to the host's planning
_MANY = 8


@dataclass(eq=False)
class HostedDevice:
    """The host-resident reads of one model on one GPU, by ``threads`` host threads, less one for
    planning if there are many.

    ``heads`` are the query heads and their dim, ``dtype`` that of queries; ``sample`` is the share
    of reads with measured recall. Threads and memory are allocated at the first read."""

    rotations: Sequence[Rotation]
    rules: Sequence[ScoreRule]
    heads: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    threads: int
    sample: float = 1 / 8192
    counters: HostedCounters = field(default_factory=HostedCounters)
    _works: "dict[int, DeviceWork]" = field(default_factory=dict)
    _number: float = 0.0

    def __post_init__(self) -> None:
        self._side: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None
        self._busy: DeviceWork | None = None

    def room(self, rows: int) -> "DeviceWork":
        """Buffers for ``rows`` rows or more, always the same object."""
        rows = 1 << (rows - 1).bit_length()
        if rows not in self._works:
            if self._side is None:
                # all threads would wait for one that shares its core with the planner
                searching = self.threads - (self.threads >= _MANY)
                self._crew, self._tables = HostThreads(searching), PlaceTables(self.heads[0])
                # a discarded engine may have a step in flight
                self._bell = self._crew.listen(
                    torch.zeros(16, dtype=torch.int64, pin_memory=True),
                    partial(torch.cuda.synchronize, self.device),
                )
                # threads and device hold no Python references: buffers must outlive their work
                weakref.finalize(self, _settled, self.device, self._works)
                self._on_host = map_distinct(self.rotations, _on_host)
                self._side = torch.cuda.Stream(self.device)
            q = torch.zeros(rows, *self.heads, dtype=self.dtype, pin_memory=True)
            work = HostedWork(self._crew, self._tables, self._on_host, self.rules, q)
            self._works[rows] = DeviceWork(
                work, self._side, self._bell, work.states.to(self.device)
            )
        return self._works[rows]

    def load(
        self,
        rows: int,
        positions: Sequence[int],
        reads: Sequence[Sequence[HostedRead]],
        windows: Sequence[WindowRow | None] = (),
    ) -> "DeviceWork":
        """Load the reads of the next step; waits until the previous step has read.

        ``rows`` is the required room; rows past ``reads`` read nothing. In ``windows`` past rows
        read the keys of their newest row."""
        work = self.room(rows)
        self.settle()
        past = sum(len(reads[n]) for n, at in enumerate(windows) if at is not None and at.age)
        searches = len(self.rules) * self.heads[0] * (sum(map(len, reads)) - past)
        sampled = None
        before, self._number = self._number, self._number + self.sample * searches
        if int(self._number) > int(before):
            # another layer and head every time
            sampled = (7 * int(self._number), 5 * int(self._number))
        work.host.load(positions, reads, sampled, windows)
        self._busy = work
        return work

    def forget(self, segment: HostedSegment) -> None:
        """Drop references to ``segment``, after the step that reads it."""
        for work in self._works.values():
            if work.host.holds(segment):
                self.settle()
                work.host.load((), ())

    @property
    def seconds(self) -> float:
        """Seconds of the host's searches and attention so far, overlapped or not."""
        spent = sum(at.nanoseconds for work in self._works.values() for at in work.host.layers)
        return float(spent) * 1e-9

    def sent(self) -> None:
        """Record that the loaded step is launched."""
        if self._busy is None or self._done is not None:
            return
        # a blocking event sleeps: the searching threads need every core
        self._done = torch.cuda.Event(blocking=True)
        self._done.record(torch.cuda.current_stream(self.device))

    def settle(self) -> None:
        """Wait for the reads in flight, and count them."""
        if self._busy is None or self._side is None:
            return
        if self._done is None:
            # a step that failed midway may have queued layers
            self._side.synchronize()
        else:
            self._done.synchronize()
        self._busy.host.collect(self.counters)
        self._done = self._busy = None


@dataclass(eq=False)
class DeviceWork:
    """`HostedWork` and its states on the device; ``side`` is the stream of both copies."""

    host: HostedWork
    side: torch.cuda.Stream
    bell: StreamSignal
    states: Tensor
    _sent: Tensor | None = None

    def begin(self, layer: int, q: Tensor) -> None:
        """Send the queries of a layer, and start its reads."""
        current = torch.cuda.current_stream(q.device)
        # keeps the queries unmodified until they are copied
        self._sent = sent = q.contiguous()
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            self.host.q[: len(q)].copy_(sent, non_blocking=True)
            _ring(self.side, self.bell, self.host.layers[layer])
            self.states.copy_(self.host.states, non_blocking=True)

    def join(self) -> AttnState:
        """The state of every row; the current stream waits for it."""
        current = torch.cuda.current_stream(self.states.device)
        current.wait_stream(self.side)
        self._sent = None
        return self.host.parts(self.states)


def _on_host(rotation: Rotation) -> Rotation:
    return Rotation(rotation.cos.cpu(), rotation.sin.cpu(), rotation.interleaved)


def _settled(device: torch.device, works: "dict[int, DeviceWork]") -> None:
    """Release ``works`` after the device's queued work."""
    # a failed device has no queued work
    with suppress(RuntimeError):
        torch.cuda.synchronize(device)
    works.clear()


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _ring(stream: torch.cuda.Stream, bell: StreamSignal, layer: ctypes.Structure) -> None:
    """Queue a layer's host work on the stream, and make the stream wait for it.

    Signals reach a spinning thread; CUDA would run a host function on a sleeping one."""
    driver, on = _driver(), ctypes.c_void_p(stream.cuda_stream)
    request, reply = ctypes.c_uint64(bell.request), ctypes.c_uint64(bell.reply)
    plain, equal = ctypes.c_uint(0), ctypes.c_uint(1)
    address = ctypes.c_uint64(ctypes.addressof(layer))
    failed = (
        driver.cuStreamWriteValue64_v2(on, request, address, plain)
        or driver.cuStreamWaitValue32_v2(on, reply, ctypes.c_uint32(1), equal)
        or driver.cuStreamWriteValue32_v2(on, reply, ctypes.c_uint32(0), plain)
    )
    if failed:
        raise EngineFault(
            f"the CUDA driver cannot write to host memory from a stream (error {failed})"
        )

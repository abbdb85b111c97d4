"""Reads of host-resident segments by rows of windows on a CPU: by C threads, beside the pool's."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from looseleaf.index.host.attend import HostedAttention, HostedRead
from looseleaf.index.host.segment import HostedSegment
from looseleaf.index.host.window import WindowRow
from looseleaf.index.host.work import HostedWork, PlaceTables
from looseleaf.index.host_threads import HostThreads
from looseleaf.types import AttnState, ScoreRule


@dataclass(eq=False)
class HostedWindows:
    """Rows of windows of one model; ``hosted`` has the threads and counters.

    ``heads`` are the query heads and their dim, ``dtype`` that of queries. Threads start at the
    first read; without a C compiler it raises NativeUnavailable."""

    hosted: HostedAttention
    rules: Sequence[ScoreRule]
    heads: tuple[int, int]
    dtype: torch.dtype
    _works: dict[int, HostedWork] = field(default_factory=dict)
    _shared: tuple[HostThreads, PlaceTables] | None = None
    _number: float = 0.0
    _running: "Future[None] | None" = None

    def __post_init__(self) -> None:
        self.hosted.kept_by(self.forget)

    def load(
        self,
        positions: Sequence[int],
        reads: Sequence[Sequence[HostedRead]],
        windows: Sequence[WindowRow],
    ) -> HostedWork:
        """Load the reads of a step's rows for all layers; see `HostedWork.load`."""
        self._settle()
        work = self._room(len(positions))
        work.collect(self.hosted.counters)
        newest = [several for several, at in zip(reads, windows, strict=True) if at.age == 0]
        searches = len(self.rules) * self.heads[0] * sum(map(len, newest))
        before, self._number = self._number, self._number + self.hosted.sample * searches
        # another layer and head every time
        number = int(self._number)
        sampled = (7 * number, 5 * number) if number > int(before) else None
        work.load(positions, reads, sampled, windows)
        return work

    def begin(self, work: HostedWork, layer: int) -> "Future[None]":
        """Start the reads of a layer."""
        self._running = self.hosted.submit(work.run, layer)
        return self._running

    def forget(self, segment: HostedSegment) -> None:
        """Drop references of the latest step to ``segment``."""
        self._settle()
        for work in self._works.values():
            if work.holds(segment):
                work.load((), ())

    def _settle(self) -> None:
        if self._running is not None:
            # a step that failed midway may have left a layer running
            self._running.exception()

    def _room(self, rows: int) -> HostedWork:
        """Buffers for ``rows`` rows or more."""
        rows = 1 << (rows - 1).bit_length()
        if rows not in self._works:
            if self._shared is None:
                self._shared = HostThreads(self.hosted.threads), PlaceTables(self.heads[0])
            q = torch.zeros(rows, *self.heads, dtype=self.dtype)
            crew, tables = self._shared
            self._works[rows] = HostedWork(crew, tables, self.hosted.rotations, self.rules, q)
        return self._works[rows]


@dataclass(eq=False)
class WindowedRows:
    """The rows of one step, by index, that read host-resident segments in windows."""

    rows: Tensor
    windows: HostedWindows
    work: HostedWork
    _pending: "Future[None] | None" = None

    def begin(self, layer: int, q: Tensor) -> None:
        """Start the reads of ``layer`` on other threads, concurrent with the pool's."""
        self.work.q[: len(self.rows)] = q[self.rows]
        self._pending = self.windows.begin(self.work, layer)

    def join(self, layer: int, q: Tensor, states: AttnState, row_state_indptr: Tensor) -> None:
        """Write the result as the last of the rows' ``states``."""
        assert self._pending is not None, "join needs a begun read"
        self._pending.result()
        self._pending = None
        last_state = row_state_indptr[self.rows + 1].long() - 1
        read, count = self.work.parts(), len(self.rows)
        states.out[last_state] = read.out[:count]
        states.lse[last_state] = read.lse[:count]
        if layer == len(self.windows.rules) - 1:
            self.work.collect(self.windows.hosted.counters)

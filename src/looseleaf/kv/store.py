"""The segment store: which segments are in the pool, who refers to them, and which go first.

A segment that nobody refers to stays until its pages are needed; then the least recently used goes
first. The store hands out pages: `reserve` evicts what it must, and takes all it was asked for or
nothing."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from looseleaf.errors import IntegrityError, PoolTooSmall
from looseleaf.kv.keys import SegmentKey
from looseleaf.kv.pool import PagePool


@runtime_checkable
class Arriving(Protocol):
    """Keys and values on their way into a segment's pages from somewhere else."""

    def sent_by(self, layer: int) -> torch.cuda.Event | None:
        """Return when ``layer`` is sent, with the event of its arrival on a GPU, or there, with
        None; raises if it will not come."""
        ...

    def beside_launches(self) -> None:
        """A pass follows on a GPU whose kernels are launched one by one."""
        ...

    def cancel(self) -> None:
        """Write nothing more to the pages."""
        ...


@dataclass(eq=False)
class Segment:
    """An immutable run of ``length`` tokens in ``pages``; ``ready`` once its last key and value is
    written.

    ``references`` counts the sequences that read it or wait for it. The store owns the
    pages for as long as the segment lives. A ``forgotten`` segment goes with its last reference.
    ``filled`` is how many of its tokens are computed, while it is not ready; one that is
    ``arriving`` is not computed by anybody.
    """

    key: SegmentKey
    length: int
    pages: tuple[int, ...]
    ready: bool = False
    references: int = 0
    pinned: bool = False
    forgotten: bool = False
    filled: int = 0
    arriving: Arriving | None = None


class PageCounts(NamedTuple):
    """Every page of the pool by state: the numbers after ``total`` add up to it.

    ``tails`` belong to running sequences, ``referenced`` to segments that some of them read,
    ``pinned`` to segments that nobody reads now but that stay, ``idle`` to those that may be
    evicted.
    """

    total: int
    free: int
    tails: int
    referenced: int
    pinned: int
    idle: int


@dataclass
class StoreCounters:
    """What happened since the store was made."""

    evicted_segments: int = 0
    evicted_pages: int = 0


@dataclass
class SegmentStore:
    """Segments by key over one pool."""

    pool: PagePool
    counters: StoreCounters = field(default_factory=StoreCounters)
    # of all pinned segments, read or not
    pinned_pages: int = 0
    _segments: dict[SegmentKey, Segment] = field(default_factory=dict)
    # unreferenced, unpinned, ready segments, least recently used first
    _idle: OrderedDict[SegmentKey, Segment] = field(default_factory=OrderedDict)
    _idle_pages: int = 0
    _segment_pages: int = 0
    # pages of pinned segments that nobody refers to
    _resting_pages: int = 0
    # how often a segment was let go of
    _num_settled: int = 0

    def __len__(self) -> int:
        return len(self._segments)

    def segments(self) -> Iterable[Segment]:
        """All segments, in no particular order."""
        return self._segments.values()

    def find(self, key: SegmentKey) -> Segment | None:
        """The segment of ``key``, ready or still being computed, or None."""
        return self._segments.get(key)

    @property
    def num_available(self) -> int:
        """Pages that `reserve` could hand out now."""
        return self.pool.num_free + self._idle_pages

    @property
    def turnover(self) -> int:
        """Grows whenever pages become free, or may be evicted: who found too few before may find
        enough."""
        return self.pool.num_freed + self._num_settled

    @property
    def page_counts(self) -> PageCounts:
        """The pages of the pool by state, from running sums."""
        total, free = self.pool.num_pages, self.pool.num_free
        held = self._segment_pages
        read = held - self._idle_pages - self._resting_pages
        return PageCounts(
            total, free, total - free - held, read, self._resting_pages, self._idle_pages
        )

    def reserve(self, count: int) -> list[int] | None:
        """``count`` pages, evicting idle segments as needed; None, and nothing evicted, if there
        are not so many."""
        if not self._make_free(count):
            return None
        return self._handed_out(self.pool.allocate(count))

    def reserve_next(self, page: int) -> list[int] | None:
        """One page as by `reserve`, the neighbour behind ``page`` if it is free."""
        if not self._make_free(1):
            return None
        return self._handed_out(self.pool.allocate_next(page))

    def insert(self, key: SegmentKey, length: int, pages: Iterable[int], *, ready: bool) -> Segment:
        """A new segment that takes ``pages`` over from the caller, with one reference to it."""
        if key in self._segments:
            raise IntegrityError("a segment was inserted twice")
        segment = Segment(key, length, tuple(pages), ready=ready, references=1)
        self._segments[key] = segment
        self._segment_pages += len(segment.pages)
        return segment

    def acquire(self, segment: Segment) -> Segment:
        """One more reference: the segment stays until `release`."""
        if segment.references == 0:
            self._unsettle(segment)
        segment.references += 1
        return segment

    def release(self, segment: Segment) -> None:
        """One reference less. The last one makes the segment idle, or drops it if it was never
        finished.
        """
        if segment.references < 1:
            raise IntegrityError("a segment was released more often than acquired")
        segment.references -= 1
        if segment.references == 0:
            if segment.ready and not segment.forgotten:
                self._settle(segment)
            else:
                self._drop(segment)

    def pin(self, segment: Segment) -> None:
        """Keep a segment until `unpin`. Raises PoolTooSmall if that would pin the whole pool."""
        pinned = self.pinned_pages + (0 if segment.pinned else len(segment.pages))
        if pinned >= self.pool.num_pages:
            raise PoolTooSmall(
                f"pinning this segment would pin {pinned} of {self.pool.num_pages} pages: "
                "unpin another one or enlarge the pool"
            )
        if segment.pinned:
            return
        resting = segment.references == 0
        if resting:
            self._unsettle(segment)
        segment.pinned = True
        self.pinned_pages += len(segment.pages)
        if resting:
            self._settle(segment)

    def unpin(self, segment: Segment) -> None:
        """Let a pinned segment be evicted again; one that is not pinned stays as it is."""
        if not segment.pinned:
            return
        resting = segment.references == 0
        if resting:
            self._unsettle(segment)
        segment.pinned = False
        self.pinned_pages -= len(segment.pages)
        if resting:
            self._settle(segment)

    def forget(self, segment: Segment) -> None:
        """Drop a segment, pinned or not: now, or with its last reference."""
        self.unpin(segment)
        if segment.references == 0:
            self._unsettle(segment)
            self._drop(segment)
        else:
            segment.forgotten = True

    def evict_idle(self) -> None:
        """Forget every segment that nobody refers to and that is not pinned."""
        while self._idle:
            self._evict_oldest()

    def check(self, private_pages: Iterable[int]) -> None:
        """Raise IntegrityError unless segments and ``private_pages`` account for every page of the
        pool.
        """
        owned = [page for segment in self._segments.values() for page in segment.pages]
        self.pool.check([*owned, *private_pages])
        idle = {
            k for k, s in self._segments.items() if s.references == 0 and not s.pinned and s.ready
        }
        if idle != set(self._idle) or self._idle_pages != sum(
            len(s.pages) for s in self._idle.values()
        ):
            raise IntegrityError("the list of idle segments does not match the references")
        resting = sum(len(s.pages) for s in self.segments() if s.pinned and s.references == 0)
        pinned = sum(len(s.pages) for s in self.segments() if s.pinned)
        found = resting, pinned, len(owned)
        if found != (self._resting_pages, self.pinned_pages, self._segment_pages):
            raise IntegrityError("the sums of pages do not match the segments")
        unfinished = [s for s in self._segments.values() if not s.ready and s.references == 0]
        if unfinished:
            raise IntegrityError(
                f"{len(unfinished)} unfinished segments have nobody who computes them"
            )

    def _make_free(self, count: int) -> bool:
        if count > self.num_available:
            return False
        while self.pool.num_free < count:
            self._evict_oldest()
        return True

    def _handed_out(self, pages: list[int] | None) -> list[int]:
        if pages is None:
            raise IntegrityError("idle segments freed fewer pages than they hold")
        return pages

    def _settle(self, segment: Segment) -> None:
        self._num_settled += 1
        if segment.pinned:
            self._resting_pages += len(segment.pages)
        else:
            self._idle[segment.key] = segment
            self._idle_pages += len(segment.pages)

    def _unsettle(self, segment: Segment) -> None:
        if segment.pinned:
            self._resting_pages -= len(segment.pages)
        else:
            del self._idle[segment.key]
            self._idle_pages -= len(segment.pages)

    def _evict_oldest(self) -> None:
        _, segment = self._idle.popitem(last=False)
        self._idle_pages -= len(segment.pages)
        self.counters.evicted_segments += 1
        self.counters.evicted_pages += len(segment.pages)
        self._drop(segment)

    def _drop(self, segment: Segment) -> None:
        del self._segments[segment.key]
        self._segment_pages -= len(segment.pages)
        if segment.pinned:
            # one that was never finished goes all the same
            segment.pinned = False
            self.pinned_pages -= len(segment.pages)
        if segment.arriving is not None:
            segment.arriving.cancel()
        self.pool.free(segment.pages)

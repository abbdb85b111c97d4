"""The segment store: the segments in the pool, their references, and their eviction.

A segment without references stays until its pages are needed. `SegmentedLru` has the order of
eviction. `reserve` allocates all requested pages, evicting segments as needed, or none."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from looseleaf.errors import IntegrityError, PoolTooSmall
from looseleaf.kv.keys import SegmentKey
from looseleaf.kv.pool import PagePool
from looseleaf.kv.segmented_lru import SegmentedLru


@runtime_checkable
class PendingLoad(Protocol):
    """A load of keys and values from a tier into a segment's pages."""

    def sent_by(self, layer: int) -> torch.cuda.Event | None:
        """Block until ``layer`` is loaded (None), or its copy to a GPU is queued (its event).

        Raises if the load fails."""
        ...

    def beside_launches(self) -> None:
        """Announce a forward pass on a GPU whose kernels are launched separately."""
        ...

    def cancel(self) -> None:
        """Stop writing to the pages."""
        ...


@dataclass(eq=False)
class Segment:
    """An immutable run of ``length`` tokens in ``pages``; ``ready`` once all are written.

    ``references`` counts the sequences that read it or wait for it. The store owns the pages during
    the segment's life. ``reused`` means that a further sequence has acquired it. A ``forgotten``
    segment is dropped with its last reference. ``filled`` counts the computed tokens of an
    unfinished segment. With a load in ``arriving``, no sequence computes the segment.
    """

    key: SegmentKey
    length: int
    pages: tuple[int, ...]
    ready: bool = False
    references: int = 0
    pinned: bool = False
    reused: bool = False
    forgotten: bool = False
    filled: int = 0
    arriving: PendingLoad | None = None


class PageCounts(NamedTuple):
    """The pages of the pool by state; the other counts add up to ``total``.

    ``tails`` belong to running sequences, ``referenced`` to segments with references, ``pinned`` to
    pinned segments without references, ``idle`` to evictable segments.
    """

    total: int
    free: int
    tails: int
    referenced: int
    pinned: int
    idle: int


@dataclass
class StoreCounters:
    """Counts since the store was created."""

    evicted_segments: int = 0
    evicted_pages: int = 0


@dataclass
class SegmentStore:
    """Segments by key over one pool; ``on_drop`` is called with the key of each that leaves it."""

    pool: PagePool
    counters: StoreCounters = field(default_factory=StoreCounters)
    on_drop: Callable[[SegmentKey], None] = lambda key: None
    # pages of all pinned segments, with references or not
    pinned_pages: int = 0
    _segments: dict[SegmentKey, Segment] = field(default_factory=dict)
    # unreferenced, unpinned, ready segments
    _idle: SegmentedLru[SegmentKey] = field(init=False)
    _segment_pages: int = 0
    # pages of pinned segments without references
    _resting_pages: int = 0
    # how often a segment lost its last reference
    _num_settled: int = 0

    def __post_init__(self) -> None:
        self._idle = SegmentedLru(self.pool.num_pages)

    def __len__(self) -> int:
        return len(self._segments)

    def segments(self) -> Iterable[Segment]:
        """All segments, in arbitrary order."""
        return self._segments.values()

    def find(self, key: SegmentKey) -> Segment | None:
        """The segment of ``key``, ready or still being computed, or None."""
        return self._segments.get(key)

    @property
    def num_available(self) -> int:
        """Pages that `reserve` could allocate now."""
        return self.pool.num_free + self._idle.size

    @property
    def turnover(self) -> int:
        """A counter that grows when pages become free or evictable.

        A failed `reserve` is worth a retry only after a change."""
        return self.pool.num_freed + self._num_settled

    @property
    def page_counts(self) -> PageCounts:
        """The pages of the pool by state, from running sums."""
        total, free = self.pool.num_pages, self.pool.num_free
        return PageCounts(
            total=total,
            free=free,
            tails=total - free - self._segment_pages,
            referenced=self._segment_pages - self._idle.size - self._resting_pages,
            pinned=self._resting_pages,
            idle=self._idle.size,
        )

    def reserve(self, count: int) -> list[int] | None:
        """``count`` pages, evicting idle segments as needed; None, without evictions, if too few
        are available."""
        if not self._make_free(count):
            return None
        return self._require_pages(self.pool.allocate(count))

    def reserve_next(self, page: int) -> list[int] | None:
        """One page as by `reserve`, preferably the one after ``page``."""
        if not self._make_free(1):
            return None
        return self._require_pages(self.pool.allocate_next(page))

    def insert(self, key: SegmentKey, length: int, pages: Iterable[int], *, ready: bool) -> Segment:
        """A new segment with one reference; ownership of ``pages`` moves to the store."""
        if key in self._segments:
            raise IntegrityError("a segment was inserted twice")
        segment = Segment(key, length, tuple(pages), ready=ready, references=1)
        self._segments[key] = segment
        self._segment_pages += len(segment.pages)
        return segment

    def acquire(self, segment: Segment) -> Segment:
        """Add the reference of a further sequence, which keeps the segment until `release`."""
        segment.reused = True
        return self.hold(segment)

    def hold(self, segment: Segment) -> Segment:
        """Add a reference that is no read by a further sequence, until `release`."""
        if segment.references == 0:
            self._unsettle(segment)
        segment.references += 1
        return segment

    def release(self, segment: Segment) -> None:
        """Remove a reference. Without references a ready segment becomes idle, another is dropped.

        Raises IntegrityError for a segment without references."""
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
                "unpin another segment or enlarge the pool"
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
        """Make a pinned segment evictable again; no effect on others."""
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
        """Drop a segment, pinned or not, now or with its last reference."""
        self.unpin(segment)
        if segment.references == 0:
            self._unsettle(segment)
            self._drop(segment)
        else:
            segment.forgotten = True

    def evict_idle(self) -> None:
        """Drop every segment that is neither referenced nor pinned."""
        while self._idle:
            self._evict_next()

    def check(self, private_pages: Iterable[int]) -> None:
        """Raise IntegrityError unless segments, ``private_pages`` and free pages are the pool."""
        owned = [page for segment in self._segments.values() for page in segment.pages]
        self.pool.check([*owned, *private_pages])
        idle = {
            k for k, s in self._segments.items() if s.references == 0 and not s.pinned and s.ready
        }
        idle_pages = sum(len(self._segments[key].pages) for key in idle)
        if idle != set(self._idle) or self._idle.size != idle_pages:
            raise IntegrityError("the list of idle segments does not match the references")
        resting = sum(len(s.pages) for s in self.segments() if s.pinned and s.references == 0)
        pinned = sum(len(s.pages) for s in self.segments() if s.pinned)
        sums = self._resting_pages, self.pinned_pages, self._segment_pages
        if (resting, pinned, len(owned)) != sums:
            raise IntegrityError("the sums of pages do not match the segments")
        unfinished = [s for s in self._segments.values() if not s.ready and s.references == 0]
        if unfinished:
            raise IntegrityError(f"{len(unfinished)} unfinished segments have no references")

    def _make_free(self, count: int) -> bool:
        if count > self.num_available:
            return False
        while self.pool.num_free < count:
            self._evict_next()
        return True

    def _require_pages(self, pages: list[int] | None) -> list[int]:
        if pages is None:
            raise IntegrityError("idle segments freed fewer pages than they own")
        return pages

    def _settle(self, segment: Segment) -> None:
        self._num_settled += 1
        if segment.pinned:
            self._resting_pages += len(segment.pages)
        else:
            self._idle.add(segment.key, len(segment.pages), reused=segment.reused)

    def _unsettle(self, segment: Segment) -> None:
        if segment.pinned:
            self._resting_pages -= len(segment.pages)
        else:
            self._idle.remove(segment.key)

    def _evict_next(self) -> None:
        segment = self._segments[self._idle.pop()]
        self.counters.evicted_segments += 1
        self.counters.evicted_pages += len(segment.pages)
        self._drop(segment)

    def _drop(self, segment: Segment) -> None:
        del self._segments[segment.key]
        self.on_drop(segment.key)
        self._segment_pages -= len(segment.pages)
        if segment.pinned:
            # an unfinished segment is dropped although it is pinned
            segment.pinned = False
            self.pinned_pages -= len(segment.pages)
        if segment.arriving is not None:
            segment.arriving.cancel()
        self.pool.free(segment.pages)

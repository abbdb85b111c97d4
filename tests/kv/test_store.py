"""The segment store, against a model of it, over random histories."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from looseleaf.errors import IntegrityError, PoolTooSmall
from looseleaf.kv.keys import SegmentKey
from looseleaf.kv.store import Segment, SegmentStore
from tests.kv.test_pool import make_pool

NUM_PAGES = 9


def key(number: int) -> SegmentKey:
    return SegmentKey(number.to_bytes(4, "little"))


class StoreMachine(RuleBasedStateMachine):
    """Random calls to a store; ``once`` and ``reused`` mirror the evictable segments."""

    def __init__(self) -> None:
        super().__init__()
        self.store = SegmentStore(make_pool(NUM_PAGES))
        self.held: list[Segment] = []
        self.private: list[int] = []
        self.once: list[Segment] = []
        self.reused: list[Segment] = []
        self.count = 0

    @property
    def idle(self) -> list[Segment]:
        """The evictable segments, next to be evicted first."""
        return self.once + self.reused

    def settle(self, segment: Segment) -> None:
        (self.reused if segment.reused else self.once).append(segment)
        while sum(len(s.pages) for s in self.reused) > 0.8 * NUM_PAGES:
            self.once.append(self.reused.pop(0))

    def unsettle(self, segments: list[Segment]) -> None:
        self.once = [other for other in self.once if other not in segments]
        self.reused = [other for other in self.reused if other not in segments]

    def alive(self) -> list[Segment]:
        return sorted(self.store.segments(), key=lambda segment: segment.key)

    def pick(self, segments: list[Segment], number: int) -> Segment:
        return segments[number % len(segments)]

    def expect_evictions(self, count: int) -> None:
        """Evict for ``count`` free pages."""
        missing = count - self.store.pool.num_free
        while missing > 0:
            segment = self.idle[0]
            missing -= len(segment.pages)
            self.unsettle([segment])

    @rule(count=st.integers(0, NUM_PAGES))
    def reserve(self, count: int) -> None:
        available, free = self.store.num_available, self.store.pool.num_free
        fits = count <= available
        if fits:
            self.expect_evictions(count)
        pages = self.store.reserve(count)
        assert (pages is not None) == fits
        if pages is None:
            assert (self.store.num_available, self.store.pool.num_free) == (available, free)
        else:
            assert len(pages) == count
            self.private += pages

    @precondition(lambda self: self.private)
    @rule()
    def reserve_next(self) -> None:
        fits, behind = self.store.num_available > 0, self.private[-1] + 1
        if fits:
            self.expect_evictions(1)
        pages = self.store.reserve_next(self.private[-1])
        assert (pages is not None) == fits
        assert len(pages or [0]) == 1
        if behind in self.private:
            assert pages != [behind]
        self.private += pages or []

    @precondition(lambda self: self.private)
    @rule(count=st.integers(1, 4), ready=st.booleans())
    def insert(self, count: int, ready: bool) -> None:
        pages, self.private = self.private[:count], self.private[count:]
        self.count += 1
        segment = self.store.insert(key(self.count), 16 * len(pages), pages, ready=ready)
        assert self.store.find(segment.key) is segment
        self.held.append(segment)

    @precondition(lambda self: self.private)
    @rule()
    def give_back(self) -> None:
        self.store.pool.free(self.private)
        self.private = []

    @precondition(lambda self: len(self.store))
    @rule(number=st.integers(0, 99))
    def acquire(self, number: int) -> None:
        segment = self.store.acquire(self.pick(self.alive(), number))
        assert segment.reused
        self.held.append(segment)
        self.unsettle([segment])

    @precondition(lambda self: len(self.store))
    @rule(number=st.integers(0, 99))
    def hold(self, number: int) -> None:
        segment = self.pick(self.alive(), number)
        before = segment.reused
        self.held.append(self.store.hold(segment))
        assert segment.reused == before
        self.unsettle([segment])

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 99))
    def finish(self, number: int) -> None:
        self.pick(self.held, number).ready = True

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 99))
    def release(self, number: int) -> None:
        segment = self.held.pop(number % len(self.held))
        self.store.release(segment)
        if segment.references == 0:
            if not segment.ready or segment.forgotten:
                assert self.store.find(segment.key) is None
            elif not segment.pinned:
                self.settle(segment)

    @precondition(lambda self: len(self.store))
    @rule(number=st.integers(0, 99))
    def pin(self, number: int) -> None:
        segment = self.pick(self.alive(), number)
        pinned = {s for s in self.alive() if s.pinned} | {segment}
        if sum(len(s.pages) for s in pinned) >= NUM_PAGES:
            with pytest.raises(PoolTooSmall, match="unpin"):
                self.store.pin(segment)
            return
        self.store.pin(segment)
        self.unsettle([segment])

    @precondition(lambda self: len(self.store))
    @rule(number=st.integers(0, 99))
    def unpin(self, number: int) -> None:
        segment = self.pick(self.alive(), number)
        was_pinned = segment.pinned
        self.store.unpin(segment)
        if was_pinned and segment.references == 0:
            self.settle(segment)

    @precondition(lambda self: len(self.store))
    @rule(number=st.integers(0, 99))
    def forget(self, number: int) -> None:
        segment = self.pick(self.alive(), number)
        self.store.forget(segment)
        assert (self.store.find(segment.key) is None) == (segment not in self.held)
        assert not segment.pinned
        self.unsettle([segment])

    @rule()
    def evict_idle(self) -> None:
        self.store.evict_idle()
        self.unsettle(self.idle)

    @invariant()
    def books_balance(self) -> None:
        self.store.check(self.private)

    @invariant()
    def exactly_held_pinned_and_idle_segments_live(self) -> None:
        alive = self.alive()
        kept = {*self.held, *self.idle, *(s for s in alive if s.pinned)}
        assert set(alive) == kept
        free_or_idle = self.store.pool.num_free + sum(len(s.pages) for s in self.idle)
        assert self.store.num_available == free_or_idle

    @invariant()
    def every_page_is_counted_in_one_state(self) -> None:
        counts = self.store.page_counts
        assert counts.total == sum(counts[1:]) == NUM_PAGES
        assert counts.free == self.store.pool.num_free
        assert counts.tails == len(self.private)
        assert counts.idle == sum(len(s.pages) for s in self.idle)
        assert counts.referenced == sum(len(s.pages) for s in set(self.held))

    @invariant()
    def references_are_counted(self) -> None:
        assert all(s.references == self.held.count(s) for s in self.alive())


StoreMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestStoreOverRandomHistories = StoreMachine.TestCase


def filled_store(lengths: list[int]) -> tuple[SegmentStore, list[Segment]]:
    """Idle segments of ``lengths`` pages, the least recently used first."""
    store, segments = SegmentStore(make_pool(NUM_PAGES)), []
    for number, length in enumerate(lengths):
        pages = store.reserve(length)
        assert pages is not None
        segments.append(store.insert(key(number), 16 * length, pages, ready=True))
    for segment in segments:
        store.release(segment)
    return store, segments


def test_the_least_recently_used_segments_go_first_and_only_as_many_as_needed() -> None:
    store, (a, b, c) = filled_store([3, 3, 3])
    store.release(store.acquire(a))
    assert store.reserve(4) is not None
    assert [store.find(s.key) for s in (a, b, c)] == [a, None, None]
    assert (store.counters.evicted_segments, store.counters.evicted_pages) == (2, 6)


def test_a_segment_that_was_read_again_outlives_newer_ones() -> None:
    store, (a, b, c) = filled_store([3, 3, 3])
    store.release(store.acquire(a))
    # a copy to a tier is no read
    store.release(store.hold(b))
    assert store.reserve(6) is not None
    assert [store.find(s.key) for s in (a, b, c)] == [a, None, None]


def test_reserve_takes_nothing_and_evicts_nothing_if_it_cannot_take_all() -> None:
    store, (a, b, _) = filled_store([3, 3, 3])
    store.acquire(b)
    assert store.reserve(7) is None
    assert len(store) == 3
    assert store.counters.evicted_segments == 0
    assert store.find(a.key) is a


def test_an_unfinished_segment_is_dropped_with_its_last_reference() -> None:
    store, _ = filled_store([])
    pages = store.reserve(2)
    assert pages is not None
    segment = store.acquire(store.insert(key(0), 20, pages, ready=False))
    store.release(segment)
    assert store.find(segment.key) is segment
    store.release(segment)
    assert store.find(segment.key) is None
    store.check([])


def test_an_unfinished_segment_that_is_pinned_leaves_no_pinned_page_behind() -> None:
    store, _ = filled_store([])
    pages = store.reserve(2)
    assert pages is not None
    segment = store.insert(key(0), 20, pages, ready=False)
    store.pin(segment)
    store.release(segment)
    assert store.find(segment.key) is None
    assert store.pinned_pages == 0
    store.check([])


def test_who_found_too_few_pages_learns_when_there_may_be_more() -> None:
    store, (a, b) = filled_store([3, 2])
    grows = [lambda: store.release(store.acquire(a)), lambda: store.forget(b), store.evict_idle]
    for free_some in grows:
        before = store.turnover
        assert store.reserve(NUM_PAGES + 1) is None
        assert store.turnover == before
        free_some()
        assert store.turnover > before


def test_a_pinned_segment_outlives_every_reservation() -> None:
    store, (a, _, _) = filled_store([3, 3, 3])
    store.pin(a)
    assert store.reserve(7) is None
    assert store.reserve(6) is not None
    assert store.find(a.key) is a


def test_a_segment_inserted_or_released_too_often_is_noticed() -> None:
    store, (a, _) = filled_store([1, 1])
    with pytest.raises(IntegrityError, match="inserted twice"):
        store.insert(a.key, 16, [], ready=True)
    with pytest.raises(IntegrityError, match="more often"):
        store.release(a)


def test_an_unfinished_segment_that_nobody_computes_is_noticed() -> None:
    store, (a,) = filled_store([2])
    store.pin(a)
    a.ready = False
    with pytest.raises(IntegrityError, match="no references"):
        store.check([])

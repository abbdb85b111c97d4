"""The loading controller: what it measures is what happens, and what it chooses is the balance."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from looseleaf import Fuse
from looseleaf.attention.plan.chunks import PrefillChunk
from looseleaf.attention.plan.groups import ReadSpan
from looseleaf.blend.fuse_budget import again, raised
from looseleaf.engine.tiering.compute_time import (
    ComputeTime,
    Launched,
    count_pairs,
    count_read,
    passes_over,
)
from looseleaf.engine.tiering.load_controller import Trials, piped, places_of
from looseleaf.errors import InvalidOption
from looseleaf.kv.keys import SegmentKey
from looseleaf.tiers.transfer.speed import Probe, TierSpeed


@given(st.floats(0, 0.05), st.floats(1e6, 1e10), st.lists(st.integers(10_000, 10**9), min_size=2))
def test_the_speed_of_a_tier_is_found_from_loads_of_several_sizes(
    latency: float, rate: float, sizes: list[int]
) -> None:
    speed = TierSpeed()
    assert speed.predict(1000) is None
    for size in [*sizes, 10_000, 10**8]:
        speed.observe(size, latency + size / rate)
    for size in (10**6, 10**8):
        assert speed.predict(size) == pytest.approx(latency + size / rate, rel=0.05, abs=1e-3)


def test_a_tier_that_has_become_slow_is_known_to_be_after_a_few_loads() -> None:
    speed = TierSpeed()
    for _ in range(50):
        speed.observe(10**7, 0.01)
    for _ in range(12):
        speed.observe(10**7, 1.0)
    predicted = speed.predict(10**7)
    assert predicted is not None and predicted > 0.8


@given(st.floats(1e-4, 0.1), st.floats(1e-6, 1e-3), st.floats(0, 1e-7))
def test_the_pace_of_a_model_is_found_from_its_steps(a: float, b: float, c: float) -> None:
    compute_time = ComputeTime()
    assert compute_time.predict(1, 1) is None
    shapes = [(1, 1), (16, 200), (64, 2000), (256, 2000), (700, 700), (700, 3000)]
    for rows, keys in shapes * 3:
        pairs = count_pairs([(rows, max(rows, keys))])
        compute_time.observe(rows, pairs, a + b * rows + c * pairs)
    for rows, keys in ((10, 100), (400, 1000)):
        pairs = count_pairs([(rows, keys)])
        assert compute_time.predict(rows, pairs) == pytest.approx(
            a + b * rows + c * pairs, rel=0.02
        )


def test_no_term_of_the_pace_is_negative_whatever_was_seen() -> None:
    compute_time = ComputeTime()
    for rows, seconds in ((10, 5.0), (100, 0.1), (1000, 0.3)):
        compute_time.observe(rows, rows * rows, seconds)
    low, high = compute_time.predict(10, 100), compute_time.predict(2000, 4_000_000)
    assert low is not None and high is not None and 0 <= low <= high


def test_every_row_reads_what_is_before_it() -> None:
    for rows, keys in ((1, 7), (3, 7), (7, 7)):
        assert count_pairs([(rows, keys)]) == sum(range(keys - rows + 1, keys + 1))


def test_documents_come_from_one_tier_where_one_has_them_all() -> None:
    a, b = SegmentKey(b"a"), SegmentKey(b"b")
    # the disk takes long to begin, and is quick then
    cost = {"disk": (5.0, 1.0), "remote": (1.0, 4.0), "host": (0.0, 0.1)}

    def seconds(name: str, tokens: Sequence[int]) -> float:
        return cost[name][0] + cost[name][1] * sum(tokens)

    both = ["disk", "remote"]
    assert places_of({a: 1, b: 1}, {a: both, b: both}, seconds) == {a: "disk", b: "disk"}
    assert places_of({a: 1}, {a: both}, seconds) == {a: "remote"}
    assert places_of({a: 1, b: 1}, {a: both, b: ["remote"]}, seconds) == {a: "remote", b: "remote"}
    apart = {a: ["disk"], b: ["host", "remote"]}
    assert places_of({a: 1, b: 1}, apart, seconds) == {a: "disk", b: "host"}
    assert places_of({}, {}, seconds) == {}


def _tried(requests: int, **seconds: float) -> list[str]:
    """Which of tiers is asked for each of so many requests, where each takes so long, if each was
    measured before."""
    speeds, trials, asked = {name: TierSpeed() for name in seconds}, Trials(), []
    for name, speed in speeds.items():
        speed.observe(1000, 1000 * seconds[name])
    for _ in range(requests):
        expected = {name: speed.predict(1000) or 0.0 for name, speed in speeds.items()}
        asked.append(trials.choose(min(expected, key=lambda n: expected[n]), expected))
        speeds[asked[-1]].observe_load(1000, 1000 * seconds[asked[-1]], launched=False)
    return asked


def test_a_tier_that_is_left_for_a_quicker_one_is_tried_again() -> None:
    asked = _tried(160, host=1.0, disk=1.5, remote=3.5, far=4.1)
    assert asked[:16] == ["host"] * 15 + ["disk"]
    # each for a sixteenth of the time, and never what is expected to take four times as long
    assert (asked.count("disk"), asked.count("remote"), asked.count("far")) == (10, 3, 0)
    assert _tried(40, host=1.0) == ["host"] * 40


def test_a_tier_that_was_slow_once_is_found_to_be_quick() -> None:
    fast, medium, trials, asked = TierSpeed(), TierSpeed(), Trials(), []
    # the first load of an engine: kernels are compiled meanwhile
    fast.observe(1000, 1.9)
    medium.observe(1000, 1.0)
    for _ in range(80):
        expected = {"fast": fast.predict(1000) or 0.0, "medium": medium.predict(1000) or 0.0}
        asked.append(trials.choose(min(expected, key=lambda n: expected[n]), expected))
        fast.observe(1000, 0.5) if asked[-1] == "fast" else medium.observe(1000, 1.0)
    assert asked[:16] == ["medium"] * 15 + ["fast"] and asked[-16:].count("fast") == 15


def test_the_first_load_of_a_tier_counts_twice_what_was_expected_at_most() -> None:
    speed = TierSpeed()
    speed.observe_probes([Probe(10**6, 1e-3, 1e-3, 1), Probe(10**7, 1e-2, 1e-2, 1)])
    speed.observe_load(10**7, 1.0, launched=False)
    assert speed.predict(10**7) == pytest.approx(1.5e-2, rel=0.4)
    # of a tier that is that slow the second one tells
    speed.observe_load(10**7, 1.0, launched=False)
    predicted = speed.predict(10**7)
    assert predicted is not None and predicted > 0.2


def test_layers_are_computed_while_the_next_ones_load() -> None:
    assert piped(8.0, 8.0, 8) == pytest.approx(9.0)
    assert piped(8.0, 0.0, 8) == pytest.approx(8.0)
    assert piped(0.0, 8.0, 8) == pytest.approx(8.0)
    assert piped(8.0, 4.0, 1) == pytest.approx(12.0)


@given(
    st.sampled_from([Fuse("random", ratio=0.1), Fuse("random", tokens=9), Fuse("first", tokens=9)]),
    st.floats(0, 1),
    st.lists(st.integers(1, 500), min_size=1, max_size=6),
)
def test_a_budget_is_raised_to_the_share_and_never_lowered(
    fuse: Fuse, share: float, lengths: list[int]
) -> None:
    settled, total = raised(fuse, share, lengths), sum(lengths)
    assert again(settled, lengths) >= again(fuse, lengths)
    if again(settled, lengths) > again(fuse, lengths):
        assert again(settled, lengths) <= share * total + 1e-6
        # another token would be too many
        assert share * total - again(settled, lengths) < max(len(lengths), 1) + 1e-6


@pytest.mark.parametrize("selector", ["all", "none", "deviation", "question", "links"])
def test_who_reads_to_choose_can_not_be_balanced(selector: str) -> None:
    with pytest.raises(InvalidOption, match="balanced"):
        Fuse(selector, balanced=True)  # type: ignore[arg-type]


def test_a_pass_that_blends_has_pairs_of_its_own_price() -> None:
    compute_time = ComputeTime()
    for rows in (10, 100, 1000):
        compute_time.observe(rows, rows * rows, 2e-3 * rows + 1e-6 * rows * rows)
    # nobody knows better yet
    assert compute_time.predict(100, 10_000, blends=True) == compute_time.predict(100, 10_000)
    for _ in range(3):
        compute_time.observe(400, 300_000, 0.8 + 4e-6 * 300_000, blends=True)
    for rows, pairs in ((100, 20_000), (700, 900_000)):
        blended = compute_time.predict(rows, pairs, blends=True)
        assert blended == pytest.approx(2e-3 * rows + 4e-6 * pairs, rel=0.02)
        assert compute_time.predict(rows, pairs) == pytest.approx(
            2e-3 * rows + 1e-6 * pairs, rel=0.02
        )


@given(st.lists(st.integers(0, 99), unique=True, max_size=99), st.integers(0, 40))
def test_pairs_are_what_rows_read_and_what_they_pass_over(again: list[int], before: int) -> None:
    """A document of 100 tokens, some of them replaced, and four of text behind it."""
    places = before + np.array(sorted(again), dtype=np.int64)
    hidden = np.zeros(128, dtype=np.bool_)
    hidden[places - before] = True
    words = np.packbits(hidden, bitorder="little").view("<i4")
    text = range(before + 100, before + 104)
    spans = [ReadSpan([0], 0, before, 0)] if before else []
    spans += [ReadSpan([1], before, 100, 0, words), ReadSpan([2], before + 100, 4, 0)]
    spans += [ReadSpan([3], 0, len(places), 0, places=places)] if len(places) else []
    rows = np.array([*places, *text])
    chunk = PrefillChunk(rows, tuple(spans))
    # all that stands there, and the patch besides
    assert count_read(chunk) == sum(int(p) + 1 + int((places <= p).sum()) for p in rows)
    assert passes_over([chunk])
    plain = PrefillChunk(text, (ReadSpan([1], 0, text.stop, 0),))
    assert count_read(plain) == sum(p + 1 for p in text) and not passes_over([plain])


def test_steps_of_a_gpu_are_known_without_what_they_waited_for() -> None:
    class Event:
        def __init__(self, at: float) -> None:
            self.at = at

        def query(self) -> bool:
            return True

        def elapsed_time(self, other: "Event") -> float:
            return 1e3 * (other.at - self.at)

    def seconds(waits: list[tuple[float, float]]) -> float | None:
        compute_time = ComputeTime()
        events = [(Event(since), Event(until)) for since, until in waits]
        compute_time.pending.append(Launched(Event(1.0), Event(2.0), 100, 100, False, events))
        compute_time.collect()
        return compute_time.predict(100, 100)

    assert seconds([]) == pytest.approx(1.0)
    assert seconds([(1.0, 1.02), (1.5, 1.56)]) == pytest.approx(0.92)
    # who has waited for more was late afterwards too
    assert seconds([(1.0, 1.1), (1.5, 1.6)]) is None

"""The rate at which a latency reaches a limit is found from few rates, though trials are noisy."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looseleaf_lab.bench.crossing import Crossing

RATES = [12.5, 25.0, 50.0, 75.0, 87.5, 100.0]


def crossing_at(limit: float, noise: float = 0.0, seed: int = 0) -> tuple[Crossing, list[float]]:
    """One whose latency is the rate, but for noise; and the rates that were tried."""
    rng, tried = random.Random(seed), list[float]()

    def measure(rate: float, number: int) -> float:
        tried.append(rate)
        return rate * (1 + rng.uniform(-noise, noise))

    return Crossing(RATES, limit, measure), tried


def found(crossing: Crossing, repetitions: int) -> float:
    crossing.search()
    for _ in range(repetitions):
        crossing.refine()
    return crossing.settle(repetitions)


@given(st.floats(13, 99))
def test_a_limit_that_is_reached_is_found_with_few_trials(limit: float) -> None:
    crossing, tried = crossing_at(limit)
    assert found(crossing, 3) == pytest.approx(limit)
    # three at most of six to find where, then two rates three times
    assert len(tried) <= 9


@pytest.mark.parametrize(("limit", "rate"), [(5.0, 0.0), (200.0, 100.0), (100.0, 100.0)])
def test_a_limit_that_no_rate_reaches_or_all_pass_is_an_end(limit: float, rate: float) -> None:
    crossing, _ = crossing_at(limit)
    assert found(crossing, 2) == rate


@given(st.floats(20, 95), st.integers(0, 1000))
def test_a_search_that_was_misled_is_put_right_by_the_means(limit: float, seed: int) -> None:
    crossing, _ = crossing_at(limit, 0.3, seed)
    rate = found(crossing, 12)
    low, high = crossing.low, crossing.high
    means = {
        n: sum(crossing.latencies[n]) / len(crossing.latencies[n])
        for n in (low, high)
        if n in crossing.latencies
    }
    assert low < 0 or means[low] <= limit
    assert high == len(RATES) or means[high] > limit
    assert rate == pytest.approx(limit, rel=0.3)


def test_every_repetition_meets_other_arrivals_and_all_rates_the_same() -> None:
    asked = list[tuple[float, int]]()

    def measure(rate: float, number: int) -> float:
        asked.append((rate, number))
        return rate

    crossing = Crossing(RATES, 60.0, measure)
    crossing.search()
    asked.clear()
    for _ in range(3):
        crossing.refine()
    assert asked == [(rate, n) for n in range(3) for rate in (50.0, 75.0)]

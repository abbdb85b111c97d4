"""Intervals hold what they promise."""

import random

import pytest

from looseleaf_lab.evals.intervals import bootstrap, interval, paired, wilson


def test_the_interval_of_a_share_is_wilsons() -> None:
    assert wilson(95, 100) == (pytest.approx(0.8882, abs=1e-4), pytest.approx(0.9785, abs=1e-4))
    assert interval([1.0] * 95 + [0.0] * 5) == wilson(95, 100)


def test_bounds_hold_the_share_itself_at_both_ends() -> None:
    for total in range(1, 60):
        assert wilson(0, total)[0] == 0.0 and wilson(total, total)[1] == 1.0


def test_a_perfect_sample_leaves_room() -> None:
    assert wilson(20, 20)[0] < 0.85
    low, high = paired([0.0] * 20)
    assert low < -0.05 < 0.05 < high


def test_scores_that_are_all_alike_leave_room_too() -> None:
    low, high = interval([0.25] * 3)
    assert low < 0.1 and high > 0.5
    # narrower the more there are, and never without the mean
    few, many = interval([0.9] * 4), interval([0.9] * 40)
    assert few[0] < many[0] < 0.9 < many[1] < few[1]


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_bootstrap_and_paired_bounds_hold_the_truth_about_19_times_in_20(share: float) -> None:
    rng = random.Random(1)
    held = {"bootstrap": 0, "paired": 0}
    rounds, size = 60, 60
    for _ in range(rounds):
        # scores of ten lines each, and two arms that are right about the same things
        values = [sum(rng.random() < share for _ in range(10)) / 10 for _ in range(size)]
        low, high = bootstrap(values)
        held["bootstrap"] += low <= share <= high
        differences = [float(rng.random() < share) - float(rng.random() < 0.5) for _ in range(size)]
        low, high = paired(differences)
        held["paired"] += low <= share - 0.5 <= high
    assert all(count >= 0.85 * rounds for count in held.values()), held


def test_differences_of_shares_in_between_are_bootstrapped() -> None:
    values = [0.25, -0.5, 0.0, 0.75] * 2
    assert paired(values) == bootstrap(values)


def test_few_or_equal_differences_leave_room_too() -> None:
    """One question is no evidence that the next gains as much."""
    for values in ([0.3], [0.3, 0.5], [-0.2] * 3, [0.25] * 20):
        low, high = paired(values)
        mean = sum(values) / len(values)
        assert -1.0 <= low < mean - 0.1 and mean + 0.1 < high <= 1.0, values
    few, many = paired([0.25] * 4), paired([0.25] * 400)
    assert few[0] < many[0] < 0.25 < many[1] < few[1]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_interval_of_few_scores_holds_the_truth_about_19_times_in_20(size: int) -> None:
    rng = random.Random(3)
    rounds, held = 200, 0
    for _ in range(rounds):
        low, high = interval([sum(rng.random() < 0.6 for _ in range(7)) / 7 for _ in range(size)])
        held += low <= 0.6 <= high
    assert held >= 0.9 * rounds, held


def test_no_observation_has_no_interval() -> None:
    for make in (bootstrap, paired, interval):
        with pytest.raises(ValueError, match="at least one"):
            make([])

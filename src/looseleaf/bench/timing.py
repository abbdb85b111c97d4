"""Timing two things fairly: in turn, several times, medians with ranges."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Seconds of some repetitions."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def range(self) -> tuple[float, float]:
        return min(self.seconds), max(self.seconds)


def time_in_turn(
    arms: Mapping[str, Callable[[], object]], repetitions: int, warm_up: int = 1
) -> dict[str, Timing]:
    """Each arm ``repetitions`` times, one after the other in every round, the order turned round by
    round: a machine that grows slower or faster meanwhile is unfair to none."""
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for round_number in range(warm_up + repetitions):
        for name in _turned(list(arms), round_number):
            gc.collect()
            start = time.perf_counter()
            arms[name]()
            seconds = time.perf_counter() - start
            if round_number >= warm_up:
                taken[name].append(seconds)
    return {name: Timing(tuple(values)) for name, values in taken.items()}


def _turned(names: Sequence[str], by: int) -> list[str]:
    by %= len(names)
    return [*names[by:], *names[:by]]

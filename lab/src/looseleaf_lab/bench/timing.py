"""Timing two things fairly: in turn, several times, medians with ranges."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from looseleaf_lab.bench.progress import SILENT, Progress


def clock_of(device_type: str) -> tuple[str, Callable[[], float]]:
    """The name of a clock and the clock: on a CPU the processor's time of this process, so that
    other work on the machine does not count; else the wall's. With several threads the former adds
    theirs up: measure with one."""
    if device_type == "cpu":
        return "CPU time", time.process_time
    return "wall", time.perf_counter


@dataclass(frozen=True)
class Repeated:
    """One figure of every repetition."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def map(self, function: Callable[[float], float]) -> "Repeated":
        """``function`` of every repetition."""
        return Repeated(tuple(map(function, self.values)))

    @property
    def range(self) -> tuple[float, float]:
        return min(self.values), max(self.values)


def measure_in_turn(
    arms: Mapping[str, Callable[[], float]],
    repetitions: int,
    warm_up: int = 1,
    progress: Progress = SILENT,
) -> dict[str, Repeated]:
    """Each arm ``repetitions`` times, one after the other in every round, the order turned round by
    round: a machine that grows slower or faster meanwhile is unfair to none.

    An arm returns its figure: seconds, or a rate.
    """
    taken: dict[str, list[float]] = {name: [] for name in arms}
    turns = [
        (round_number, name)
        for round_number in range(warm_up + repetitions)
        for name in _turned(list(arms), round_number)
    ]
    for round_number, name in progress.over(turns, lambda turn: f"round {turn[0] + 1}, {turn[1]}"):
        gc.collect()
        figure = arms[name]()
        if round_number >= warm_up:
            taken[name].append(figure)
    return {name: Repeated(tuple(values)) for name, values in taken.items()}


def _turned(names: Sequence[str], by: int) -> list[str]:
    by %= len(names)
    return [*names[by:], *names[:by]]

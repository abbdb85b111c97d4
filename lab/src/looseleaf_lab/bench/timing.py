"""Alternating measurements of several arms, with medians and ranges."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from looseleaf_lab.bench.progress import SILENT, Progress


def clock_of(device_type: str) -> tuple[str, Callable[[], float]]:
    """A clock and its name: CPU time of this process on a CPU, else wall time.

    CPU time excludes other processes, but adds up threads: measure with one thread."""
    if device_type == "cpu":
        return "CPU time", time.process_time
    return "wall", time.perf_counter


@dataclass(frozen=True)
class Samples:
    """One figure per repetition."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def map(self, function: Callable[[float], float]) -> "Samples":
        """``function`` of every figure."""
        return Samples(tuple(map(function, self.values)))

    @property
    def range(self) -> tuple[float, float]:
        return min(self.values), max(self.values)


def measure_in_turn(
    arms: Mapping[str, Callable[[], float]],
    repetitions: int,
    warm_up: int = 1,
    progress: Progress = SILENT,
) -> dict[str, Samples]:
    """``repetitions`` figures of each arm (seconds, or rates), after ``warm_up`` uncounted rounds.

    Arms alternate in every round, in rotated order, so that a drift of the machine's speed affects
    all arms alike.
    """
    values: dict[str, list[float]] = {name: [] for name in arms}
    runs = [
        (round_number, name)
        for round_number in range(warm_up + repetitions)
        for name in _rotated(list(arms), round_number)
    ]
    for round_number, name in progress.over(runs, lambda run: f"round {run[0] + 1}, {run[1]}"):
        gc.collect()
        figure = arms[name]()
        if round_number >= warm_up:
            values[name].append(figure)
    return {name: Samples(tuple(samples)) for name, samples in values.items()}


def _rotated(names: Sequence[str], offset: int) -> list[str]:
    offset %= len(names)
    return [*names[offset:], *names[:offset]]

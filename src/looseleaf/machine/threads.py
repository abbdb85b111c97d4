"""The number of PyTorch's threads on a CPU: the caller's, or a measured number.

Each product waits for its slowest thread. If other processes keep cores busy, threads wait
milliseconds for a core. A single thread may then be many times faster."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch

from looseleaf.machine.limits import usable_cores

_log = logging.getLogger(__name__)

VARIABLE = "OMP_NUM_THREADS"

# fewer threads must be faster by this factor, above the scatter of an idle machine
_MIN_SPEEDUP = 1.5
# a product that scales over tens of cores and takes some milliseconds on one
_ROWS, _WIDTH = 64, 1024
_ROUNDS = 3
_MAX_SECONDS = 0.5


@dataclass(frozen=True)
class ThreadChoice:
    """A number of ``threads`` of at most ``most``, and the ``reason``."""

    threads: int
    most: int
    reason: str

    def __str__(self) -> str:
        return f"computing with {self.threads} of {self.most} threads: {self.reason}"


def fit_threads(option: int | None, *, on_cpu: bool) -> ThreadChoice:
    """Set PyTorch's number of threads for this process, and return the choice.

    ``option`` wins, then the environment's OMP_NUM_THREADS. The default is the number of usable
    cores, for a model ``on_cpu`` the fastest number under the current load."""
    choice = _choose(option, on_cpu)
    if choice.threads != torch.get_num_threads():
        torch.set_num_threads(choice.threads)
    _log.info("%s", choice)
    return choice


def _choose(option: int | None, on_cpu: bool) -> ThreadChoice:
    cores, current = usable_cores(), torch.get_num_threads()
    if option is not None:
        return ThreadChoice(option, max(option, cores), "the option threads says so")
    if VARIABLE in os.environ:
        return ThreadChoice(current, max(current, cores), f"{VARIABLE} says so")
    most = min(cores, current)
    if most == 1 or not on_cpu:
        return ThreadChoice(most, most, "as many as this process may use")
    seconds = measure(most)
    number = fewest_waits(seconds)
    slower = seconds[most] / seconds[number]
    if number == most:
        reason = "no smaller number is clearly faster"
    else:
        reason = (
            f"the cores are busy, and {most} threads took {slower:.0f} times as long; "
            f"the option threads or {VARIABLE} overrides this"
        )
    return ThreadChoice(number, most, reason)


def fewest_waits(seconds: Mapping[int, float]) -> int:
    """The largest number of threads in ``seconds`` that no other number clearly beats."""
    best = min(seconds.values())
    return max(n for n, duration in seconds.items() if duration <= _MIN_SPEEDUP * best)


@cache
def measure(most: int) -> Mapping[int, float]:
    """Seconds of a product with ``most`` threads, a half, a quarter and so on to 1.

    Measured once per process, whose own work would disturb later measurements. Leaves ``most``
    threads set."""
    x, weight = torch.ones(_ROWS, _WIDTH), torch.ones(_WIDTH, _WIDTH)
    return time_each(_halvings(most), lambda: torch.nn.functional.linear(x, weight))


def time_each(numbers: list[int], product: Callable[[], object]) -> dict[int, float]:
    """Mean seconds of ``product`` for each of the ``numbers`` of threads.

    Numbers alternate in rounds, so all see the same load. Leaves the first number set."""
    seconds, times = dict.fromkeys(numbers, 0.0), dict.fromkeys(numbers, 0)
    end = time.perf_counter() + _MAX_SECONDS
    for _ in range(_ROUNDS):
        for number in numbers:
            if times[number] and time.perf_counter() > end:
                continue
            torch.set_num_threads(number)
            # the first product starts the threads
            product()
            start = time.perf_counter()
            product()
            seconds[number] += time.perf_counter() - start
            times[number] += 1
    torch.set_num_threads(numbers[0])
    return {number: seconds[number] / times[number] for number in numbers}


def _halvings(most: int) -> list[int]:
    numbers = [most]
    while numbers[-1] > 1:
        numbers.append(numbers[-1] // 2)
    return numbers

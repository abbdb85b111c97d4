"""How many threads PyTorch computes with on a CPU: the caller's number, or a measured one.

Each product waits for the slowest of its threads. Where other processes keep cores busy, a thread
waits for a core for milliseconds, and one thread alone is many times faster than all."""

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

# all threads are kept unless fewer are faster by this factor: an idle machine scatters, too
_CLEARLY_FASTER = 1.5
# a product that scales over tens of cores and takes some milliseconds on one
_ROWS, _WIDTH = 64, 1024
_ROUNDS = 3
_MOST_SECONDS = 0.5


@dataclass(frozen=True)
class ThreadChoice:
    """A number of ``threads``, of as many as ``most``, and the ``reason`` for it."""

    threads: int
    most: int
    reason: str

    def __str__(self) -> str:
        return f"computing with {self.threads} of {self.most} threads: {self.reason}"


def fit_threads(asked: int | None, *, on_cpu: bool) -> ThreadChoice:
    """Set PyTorch's number of threads for this process, and return the choice.

    ``asked`` wins, then the environment's OMP_NUM_THREADS. Without either, threads are no more than
    the cores that the process may use, and for a model ``on_cpu`` as many as are fast there now."""
    choice = _choose(asked, on_cpu)
    if choice.threads != torch.get_num_threads():
        torch.set_num_threads(choice.threads)
    _log.info("%s", choice)
    return choice


def _choose(asked: int | None, on_cpu: bool) -> ThreadChoice:
    cores, present = usable_cores(), torch.get_num_threads()
    if asked is not None:
        return ThreadChoice(asked, max(asked, cores), "the option threads says so")
    if VARIABLE in os.environ:
        return ThreadChoice(present, max(present, cores), f"{VARIABLE} says so")
    most = min(cores, present)
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
    """The largest number of threads, of those with their ``seconds``, that none beats clearly."""
    best = min(seconds.values())
    return max(n for n, taken in seconds.items() if taken <= _CLEARLY_FASTER * best)


@cache
def measure(most: int) -> Mapping[int, float]:
    """Seconds of a product with ``most`` threads, half of them, a quarter, to 1; measured once in
    a process, whose own work would disturb a later measurement. Leaves ``most`` threads set."""
    x, weight = torch.ones(_ROWS, _WIDTH), torch.ones(_WIDTH, _WIDTH)
    return time_each(_halvings(most), lambda: torch.nn.functional.linear(x, weight))


def time_each(numbers: list[int], product: Callable[[], object]) -> dict[int, float]:
    """Mean seconds of ``product`` with each of these ``numbers`` of threads, in turn by rounds, so
    that all meet the same load. Leaves the first of them set."""
    seconds, times = dict.fromkeys(numbers, 0.0), dict.fromkeys(numbers, 0)
    end = time.perf_counter() + _MOST_SECONDS
    for _ in range(_ROUNDS):
        for number in numbers:
            if times[number] and time.perf_counter() > end:
                continue
            torch.set_num_threads(number)
            # the first product of a team of threads starts them
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

"""Requests at random times, and their waits for the first and the last token."""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from looseleaf.engine.engine import Engine
from looseleaf.engine.progress import RequestProgress


class Wait(NamedTuple):
    """Seconds from a request's arrival to its first token, and to its last."""

    first: float
    last: float


def poisson_arrivals(rate: float, number: int, seed: int = 0) -> list[float]:
    """Arrival times (s) of ``number`` requests of a Poisson process with ``rate`` per second."""
    rng, arrival, arrivals = random.Random(seed), 0.0, []
    for _ in range(number):
        arrival += rng.expovariate(rate)
        arrivals.append(arrival)
    return arrivals


def serve(
    engine: Engine,
    clock: Callable[[], float],
    add: Callable[[int], RequestProgress],
    arrivals: Sequence[float],
) -> list[Wait]:
    """Add request ``n`` by ``add(n)`` at its arrival time; returns the waits when all have ended.

    While the engine is empty, the clock skips to the next arrival. An arrival during a step waits
    for its end. Raises the error of a failed request."""
    submitted, first, last = list[RequestProgress](), dict[int, float](), dict[int, float]()
    start = clock()
    while len(last) < len(arrivals):
        now = clock() - start
        if not engine.has_work and len(submitted) < len(arrivals):
            start -= max(0.0, arrivals[len(submitted)] - now)
            now = clock() - start
        while len(submitted) < len(arrivals) and arrivals[len(submitted)] <= now:
            submitted.append(add(len(submitted)))
        if engine.has_work:
            engine.step()
        now = clock() - start
        for number, progress in enumerate(submitted):
            if progress.error is not None:
                raise progress.error
            if number not in first and progress.metrics.first_token is not None:
                first[number] = now - arrivals[number]
            if number not in last and progress.finished:
                last[number] = now - arrivals[number]
    return [Wait(first[n], last[n]) for n in range(len(arrivals))]

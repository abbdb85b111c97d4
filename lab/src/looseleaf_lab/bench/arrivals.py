"""Requests that come at random times, and how long each waits for its first and its last token."""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from looseleaf.engine.engine import Engine
from looseleaf.engine.progress import RequestProgress


class Waited(NamedTuple):
    """Seconds from a request's arrival to its first token, and to its last."""

    first: float
    last: float


def arrive_at_random(rate: float, number: int, seed: int = 0) -> list[float]:
    """Seconds at which ``number`` requests arrive, ``rate`` a second on average, independently of
    one another; the same for the same arguments."""
    rng, at, arrivals = random.Random(seed), 0.0, []
    for _ in range(number):
        at += rng.expovariate(rate)
        arrivals.append(at)
    return arrivals


def serve(
    engine: Engine,
    clock: Callable[[], float],
    add: Callable[[int], RequestProgress],
    arrivals: Sequence[float],
) -> list[Waited]:
    """Add request ``n`` by ``add(n)`` when its time has come, until all have ended.

    Nobody waits for an empty engine: the clock is then turned forward to the next arrival. What
    arrives in the midst of a step waits for its end. Raises the error of a request that fails."""
    added, first, last = list[RequestProgress](), dict[int, float](), dict[int, float]()
    start = clock()
    while len(last) < len(arrivals):
        now = clock() - start
        if not engine.has_work and len(added) < len(arrivals):
            start -= max(0.0, arrivals[len(added)] - now)
            now = clock() - start
        while len(added) < len(arrivals) and arrivals[len(added)] <= now:
            added.append(add(len(added)))
        if engine.has_work:
            engine.step()
        now = clock() - start
        for number, progress in enumerate(added):
            if progress.error is not None:
                raise progress.error
            if number not in first and progress.metrics.first_token is not None:
                first[number] = now - arrivals[number]
            if number not in last and progress.finished:
                last[number] = now - arrivals[number]
    return [Waited(first[n], last[n]) for n in range(len(arrivals))]

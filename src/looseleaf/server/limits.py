"""How often and how many at a time: limits of each key, and of the queue as a whole."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from looseleaf.server.errors import ApiError, busy


@dataclass
class _Usage:
    """What a key has used: requests under way, and what is left in its bucket at a moment."""

    running: int = 0
    tokens: float = 0.0
    moment: float = 0.0


class KeyLimits:
    """A token bucket and a count of running requests for each key. None is no limit."""

    def __init__(
        self,
        per_minute: int | None,
        concurrent: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_minute, self._concurrent, self._clock = per_minute, concurrent, clock
        self._usage: dict[str, _Usage] = {}

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        """One request under way. Raises ApiError (429) if the key has used up its share."""
        usage = self._usage.get(key)
        if usage is None:
            usage = _Usage(0, float(self._per_minute or 0), self._clock())
            self._usage[key] = usage
        if self._concurrent is not None and usage.running >= self._concurrent:
            raise busy(
                f"this key has {usage.running} requests under way, the most it may have: "
                "wait for one to end",
                1.0,
                "concurrency_limit_exceeded",
            )
        self._take(usage)
        usage.running += 1
        try:
            yield
        finally:
            usage.running -= 1

    def _take(self, usage: _Usage) -> None:
        if self._per_minute is None:
            return
        now = self._clock()
        rate = self._per_minute / 60
        usage.tokens = min(self._per_minute, usage.tokens + (now - usage.moment) * rate)
        usage.moment = now
        if usage.tokens < 1:
            raise busy(
                f"this key may make {self._per_minute} requests a minute: slow down",
                (1 - usage.tokens) / rate,
            )
        usage.tokens -= 1


class Queue:
    """Outputs accepted and not ended, bounded: as many as run at once and as may wait for that."""

    def __init__(
        self, running: int, waiting: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._running, self._most, self._clock = running, running + waiting, clock
        # how long a place is held, but for the wait behind those that had one before
        self._seconds = 1.0
        self.taken = 0

    @contextmanager
    def places(self, number: int) -> Iterator[None]:
        """Places for ``number`` outputs. Raises ApiError: 429 if there are too few now, 400 if
        there never are so many."""
        if number > self._most:
            raise ApiError(
                400,
                f"the request asks for {number} outputs, but the queue holds {self._most}: lower "
                "n, or send fewer prompts",
                param="n",
                code="too_many_outputs",
            )
        if self.taken + number > self._most:
            raise busy(
                f"the queue is full: {self.taken} outputs are under way or wait; try again later",
                min(60.0, self._rounds * self._seconds),
                "queue_full",
            )
        self.taken += number
        start, rounds = self._clock(), self._rounds
        try:
            yield
        finally:
            self.taken -= number
            # a moving mean tells the next one how long it is likely to last
            self._seconds += 0.1 * ((self._clock() - start) / rounds - self._seconds)

    @property
    def _rounds(self) -> float:
        """How often as many outputs as run at once must end until all that have a place have."""
        return max(1.0, self.taken / self._running)

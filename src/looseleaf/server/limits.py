"""Rate limits of API keys, and the bounded queue of outputs."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from looseleaf.server.errors import ApiError, busy


@dataclass
class _Usage:
    """A key's running requests, and the tokens of its bucket at ``moment``."""

    running: int = 0
    tokens: float = 0.0
    moment: float = 0.0


class KeyLimits:
    """A token bucket and a count of running requests for each key; None means unlimited."""

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
        """Count one running request. Raises ApiError (429) above the key's limits."""
        usage = self._usage.get(key)
        if usage is None:
            usage = _Usage(0, float(self._per_minute or 0), self._clock())
            self._usage[key] = usage
        if self._concurrent is not None and usage.running >= self._concurrent:
            raise busy(
                f"this key has {usage.running} requests under way, its limit: wait until a "
                "request ends",
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
    """Bounds the accepted outputs: ``running`` at a time, and ``waiting`` more."""

    def __init__(
        self, running: int, waiting: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._running, self._capacity, self._clock = running, running + waiting, clock
        # mean seconds from reservation to end, without the wait for earlier outputs
        self._seconds = 1.0
        self.reserved = 0

    @contextmanager
    def reserve(self, number: int) -> Iterator[None]:
        """Reserve ``number`` outputs. Raises ApiError: 429 if full, 400 above the capacity."""
        if number > self._capacity:
            raise ApiError(
                400,
                f"the request has {number} outputs, but the queue holds {self._capacity}: lower n, "
                "or send fewer prompts",
                param="n",
                code="too_many_outputs",
            )
        if self.reserved + number > self._capacity:
            raise busy(
                f"the queue is full with {self.reserved} outputs: try again later",
                min(60.0, self._rounds * self._seconds),
                "queue_full",
            )
        self.reserved += number
        start, rounds = self._clock(), self._rounds
        try:
            yield
        finally:
            self.reserved -= number
            # a moving mean, for Retry-After
            self._seconds += 0.1 * ((self._clock() - start) / rounds - self._seconds)

    @property
    def _rounds(self) -> float:
        """Batches of running outputs until every reserved output has ended."""
        return max(1.0, self.reserved / self._running)

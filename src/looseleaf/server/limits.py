"""Rate limits of API keys, and the bounded queue of outputs."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from looseleaf.server.counts import QUEUE, Counts
from looseleaf.server.errors import ApiError, busy


class KeyLimits:
    """A token bucket and a count of running requests for each key; None means unlimited."""

    def __init__(
        self,
        per_minute: int | None,
        concurrent: int | None,
        clock: Callable[[], float] = time.monotonic,
        counts: Counts | None = None,
    ) -> None:
        self._per_minute, self._concurrent, self._clock = per_minute, concurrent, clock
        self._counts = Counts() if counts is None else counts

    def forget(self, key: str) -> None:
        """Drop the counts of a key without running requests."""
        self._counts.drop(f"key {key}")

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        """Count one running request. Raises ApiError (429) above the key's limits."""
        if self._per_minute is None and self._concurrent is None:
            yield
            return
        counts, name = self._counts, f"key {key}"
        with counts.locked():
            running = counts.total(name)
            if self._concurrent is not None and running >= self._concurrent:
                raise busy(
                    f"this key has {running} requests under way, its limit: wait until a request "
                    "ends",
                    1.0,
                    "concurrency_limit_exceeded",
                )
            self._take(name)
            counts.add(name, 1)
        try:
            yield
        finally:
            with counts.locked():
                counts.add(name, -1)

    def _take(self, name: str) -> None:
        if self._per_minute is None:
            return
        now = self._clock()
        rate = self._per_minute / 60
        tokens, moment = self._counts.bucket(name) or (float(self._per_minute), now)
        tokens = min(self._per_minute, tokens + (now - moment) * rate)
        refused = tokens < 1
        self._counts.set_bucket(name, tokens - (not refused), now)
        if refused:
            raise busy(
                f"this key may make {self._per_minute} requests a minute: slow down",
                (1 - tokens) / rate,
            )


class Queue:
    """Bounds the accepted outputs: ``running`` at a time, and ``waiting`` more."""

    def __init__(
        self,
        running: int,
        waiting: int,
        clock: Callable[[], float] = time.monotonic,
        counts: Counts | None = None,
    ) -> None:
        self._running, self._capacity, self._clock = running, running + waiting, clock
        self._counts = Counts() if counts is None else counts
        # mean seconds from reservation to end, without the wait for earlier outputs
        self._seconds = 1.0

    @property
    def reserved(self) -> int:
        """The accepted outputs, of all processes."""
        return self._counts.total(QUEUE)

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
        with self._counts.locked():
            reserved = self.reserved
            if reserved + number > self._capacity:
                raise busy(
                    f"the queue is full with {reserved} outputs: try again later",
                    min(60.0, self._rounds * self._seconds),
                    "queue_full",
                )
            self._counts.add(QUEUE, number)
        start, rounds = self._clock(), self._rounds
        try:
            yield
        finally:
            with self._counts.locked():
                self._counts.add(QUEUE, -number)
            # a moving mean, for Retry-After
            self._seconds += 0.1 * ((self._clock() - start) / rounds - self._seconds)

    @property
    def _rounds(self) -> float:
        """Batches of running outputs until every reserved output has ended."""
        return max(1.0, self.reserved / self._running)

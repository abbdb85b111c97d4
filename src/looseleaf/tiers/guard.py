"""A tier behind a breaker: its failures are counted, and one that keeps failing is left alone for a
while.

Nothing that a tier does gets past this: an exception of any kind is a fault, and a fault is an
answer like "not there"."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from looseleaf.tiers.stores.base import Fault, Tier, TierCounters, TierFault

T = TypeVar("T")
_log = logging.getLogger(__name__)
# faults of the tier, not of one record
_OF_THE_TIER: tuple[Fault, ...] = ("timeout", "unavailable")


@dataclass(eq=False)
class Breaker:
    """Opens after ``threshold`` failures in a row; ``cooldown`` seconds later one call may try."""

    threshold: int = 3
    cooldown: float = 5.0
    clock: Callable[[], float] = time.monotonic
    _failures: int = 0
    _retry_at: float = 0.0
    _trying: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_open(self) -> bool:
        """Whether the tier is left alone now."""
        with self._lock:
            return self._failures >= self.threshold and self.clock() < self._retry_at

    def allow(self) -> bool:
        """Whether a call may be made; the one that tries again keeps others back meanwhile."""
        with self._lock:
            if self._failures < self.threshold:
                return True
            if self.clock() < self._retry_at:
                return False
            self._retry_at = self.clock() + self.cooldown
            self._trying = True
            return True

    def book(self, *, well: bool, proof: bool = True) -> bool:
        """How a call went; returns whether the breaker opens by it.

        A call that tries again and is no ``proof`` of health lets others try, but the next failure
        counts as the last of a row. One that began before the failures says nothing."""
        with self._lock:
            trying, self._trying = self._trying, False
            if well:
                if proof:
                    self._failures = 0
                elif trying:
                    self._failures = min(self._failures, self.threshold - 1)
                return False
            self._failures += 1
            self._retry_at = self.clock() + self.cooldown
            return self._failures == self.threshold


@dataclass(eq=False)
class Guard:
    """Calls to one tier, by any thread. What fails to be written says nothing of what is there: a
    folder may be read-only. But nothing is written to a tier that can't be read."""

    tier: Tier
    counters: TierCounters
    breaker: Breaker = field(default_factory=Breaker)
    writing: Breaker = field(default_factory=Breaker)

    @property
    def name(self) -> str:
        return self.tier.name

    def call(
        self, act: Callable[[Tier], T], otherwise: T, *, proof: bool = True, writes: bool = False
    ) -> T:
        """What ``act`` makes of the tier, or ``otherwise`` if that fails or is not tried.

        A call that moves no data is no ``proof`` that the tier is well; one that ``writes`` is no
        proof that it can be read."""
        breaker = self.writing if writes else self.breaker
        if (writes and self.breaker.is_open) or not breaker.allow():
            self.counters.skipped += 1
            return otherwise
        try:
            result = act(self.tier)
        except Exception as error:
            self.fail(error, writes=writes)
            return otherwise
        breaker.book(well=True, proof=proof)
        return result

    def fail(self, error: Exception, *, writes: bool = False) -> None:
        """Count a failure, of a call that ``writes`` or of one that doesn't."""
        kind: Fault = error.kind if isinstance(error, TierFault) else "unavailable"
        self.counters.count_fault(kind)
        if kind == "full" and self.counters.faults[kind] == 1:
            _log.warning(
                "the %s tier is full, so documents are not kept there: %s", self.name, error
            )
        if not isinstance(error, TierFault):
            _log.error("a fault in the %s tier", self.name, exc_info=error)
        breaker = self.writing if writes else self.breaker
        if kind in _OF_THE_TIER and breaker.book(well=False):
            what = "is not written to" if writes else "is left alone"
            _log.warning(
                "the %s tier keeps failing and %s for %g s at a time: %s",
                self.name,
                what,
                breaker.cooldown,
                error,
            )
        elif kind in _OF_THE_TIER and self.counters.faults[kind] == 1:
            _log.warning("the %s tier failed for the first time: %s", self.name, error)

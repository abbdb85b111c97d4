"""A circuit breaker around a tier: counts failures and pauses calls after several in a row.

Every exception of a tier becomes a counted fault, and the caller gets a default result."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from looseleaf.tiers.stores.base import Fault, Tier, TierCounters, TierFault

T = TypeVar("T")
_log = logging.getLogger(__name__)
# faults of the tier rather than of one record
_TIER_FAULTS: tuple[Fault, ...] = ("timeout", "unavailable")


@dataclass(eq=False)
class Breaker:
    """Opens after ``threshold`` failures in a row; one retry is allowed after ``cooldown`` s."""

    threshold: int = 3
    cooldown: float = 5.0
    clock: Callable[[], float] = time.monotonic
    _failures: int = 0
    _retry_at: float = 0.0
    _is_retrying: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_open(self) -> bool:
        """Whether calls are paused."""
        with self._lock:
            return self._failures >= self.threshold and self.clock() < self._retry_at

    def allow(self) -> bool:
        """Whether a call may run. A retry keeps other calls paused."""
        with self._lock:
            if self._failures < self.threshold:
                return True
            if self.clock() < self._retry_at:
                return False
            self._retry_at = self.clock() + self.cooldown
            self._is_retrying = True
            return True

    def record(self, *, well: bool, proof: bool = True) -> bool:
        """Records the result of a call; returns whether the breaker opens now.

        A successful retry without ``proof`` of health closes the breaker, but one more failure
        opens it again."""
        with self._lock:
            retrying, self._is_retrying = self._is_retrying, False
            if well:
                if proof:
                    self._failures = 0
                elif retrying:
                    self._failures = min(self._failures, self.threshold - 1)
                return False
            self._failures += 1
            self._retry_at = self.clock() + self.cooldown
            return self._failures == self.threshold


@dataclass(eq=False)
class Guard:
    """Calls to one tier, from any thread.

    Failed writes do not pause reads, because a folder may be read-only. An open read breaker pauses
    writes too."""

    tier: Tier
    counters: TierCounters
    breaker: Breaker = field(default_factory=Breaker)
    writing: Breaker = field(default_factory=Breaker)

    @property
    def name(self) -> str:
        return self.tier.name

    def call(
        self, act: Callable[[Tier], T], default: T, *, proof: bool = True, writes: bool = False
    ) -> T:
        """The result of ``act``; ``default`` if it fails or is skipped.

        Calls that move no data are no ``proof`` of health. ``writes`` selects the breaker of
        writes."""
        breaker = self.writing if writes else self.breaker
        if (writes and self.breaker.is_open) or not breaker.allow():
            self.counters.skipped += 1
            return default
        try:
            result = act(self.tier)
        except Exception as error:
            self.fail(error, writes=writes)
            return default
        breaker.record(well=True, proof=proof)
        return result

    def fail(self, error: Exception, *, writes: bool = False) -> None:
        """Counts a failure and logs the first of a kind."""
        kind: Fault = error.kind if isinstance(error, TierFault) else "unavailable"
        self.counters.count_fault(kind)
        if kind == "full" and self.counters.faults[kind] == 1:
            _log.warning(
                "the %s tier is full, so documents are not kept there: %s", self.name, error
            )
        if not isinstance(error, TierFault):
            _log.error("a fault in the %s tier", self.name, exc_info=error)
        breaker = self.writing if writes else self.breaker
        if kind in _TIER_FAULTS and breaker.record(well=False):
            action = "is not written to" if writes else "is left alone"
            _log.warning(
                "the %s tier keeps failing and %s for %g s at a time: %s",
                self.name,
                action,
                breaker.cooldown,
                error,
            )
        elif kind in _TIER_FAULTS and self.counters.faults[kind] == 1:
            _log.warning("the %s tier failed for the first time: %s", self.name, error)

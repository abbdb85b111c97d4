"""The load of replicas, and the bound by which a hot document gets more replicas.

The rule is that of consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam,
2016): no replica gets more than ``factor`` times the mean. It applies to requests in flight, and to
the recent requests, whose counts halve at intervals. The first is a law, the second a preference,
since a slow replica may reach the first bound before its share of recent requests."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LoadLimits:
    """``factor`` bounds a replica's share of the mean load.

    A replica with fewer than ``slack`` requests in flight is never refused for them. Recent
    requests halve in ``half_life`` seconds, and count from ``recent_slack`` on."""

    factor: float = 1.25
    slack: int = 4
    half_life: float = 60.0
    recent_slack: float = 16.0


@dataclass
class _Load:
    running: int = 0
    recent: float = 0.0
    since: float = 0.0


@dataclass(eq=False)
class Loads:
    """Requests in flight and recent requests per replica; ``clock`` returns seconds."""

    clock: Callable[[], float]
    limits: LoadLimits = field(default_factory=LoadLimits)
    _loads: dict[str, _Load] = field(default_factory=dict)

    def begin(self, replica: str) -> None:
        """Count a request that is sent to a replica."""
        load = self._current(replica)
        load.running += 1
        load.recent += 1.0

    def end(self, replica: str) -> None:
        """Count the end of a request."""
        load = self._loads.get(replica)
        if load is not None:
            load.running = max(0, load.running - 1)

    def withdraw(self, replica: str) -> None:
        """Take back the count of a request that was not sent after all."""
        self.end(replica)
        load = self._loads.get(replica)
        if load is not None:
            load.recent = max(0.0, load.recent - 1.0)

    def forget(self, replica: str) -> None:
        """Drop the counts of a replica that has left."""
        self._loads.pop(replica, None)

    def running(self, replica: str) -> int:
        """Requests in flight."""
        load = self._loads.get(replica)
        return load.running if load else 0

    def recent(self, replica: str) -> float:
        """Recent requests, with older ones at less weight."""
        return self._current(replica).recent

    def bound(self, replicas: Sequence[str]) -> int:
        """The most requests in flight of one replica, the next request included."""
        total = sum(map(self.running, replicas)) + 1
        return max(self.limits.slack, math.ceil(self.limits.factor * total / len(replicas)))

    def eligible(self, replicas: Sequence[str]) -> list[str]:
        """The replicas within the bounds, in the given order; at least one of ``replicas``."""
        bound = self.bound(replicas)
        allowed = [r for r in replicas if self.running(r) + 1 <= bound]
        total = sum(map(self.recent, replicas)) + 1.0
        recent_bound = max(self.limits.recent_slack, self.limits.factor * total / len(replicas))
        return [r for r in allowed if self.recent(r) + 1.0 <= recent_bound] or allowed

    def _current(self, replica: str) -> _Load:
        load, now = self._loads.setdefault(replica, _Load(since=self.clock())), self.clock()
        if now > load.since:
            load.recent *= 0.5 ** ((now - load.since) / self.limits.half_life)
            load.since = now
        return load

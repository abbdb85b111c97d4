"""Latency and rate of a tier, estimated from its loads.

Recent loads count more. Passes whose kernels are launched one by one compete with loading threads
for the interpreter, so the slowdown beside them is a separate estimate."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

_MEMORY = 0.8
# bound of the first load, as a multiple of its prediction
_FIRST = 2.0


@dataclass(frozen=True)
class Probe:
    """Timed reads of ``num_bytes`` each: one alone, and ``workers`` in parallel until the last
    ends."""

    num_bytes: int
    single_seconds: float
    parallel_seconds: float
    workers: int


@dataclass(eq=False)
class TierSpeed:
    """The fit ``seconds = latency + bytes / rate``, by least squares with decaying weights.

    Bytes are those of one worker among several. ``sharing`` is the contention between workers: 0
    gives each the full ``rate``, 1 divides it among them. ``calibrated`` is set by the first load
    without a concurrent launch. ``slowdown`` is the factor beside such launches, None before the
    first. Thread-safe."""

    calibrated: bool = False
    slowdown: float | None = None
    sharing: float = 0.0
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def observe_probes(self, probes: Sequence["Probe"]) -> None:
        """Adds first measurements, in rising sizes."""
        with self._lock:
            for probe in probes:
                if probe.workers > 1:
                    times = probe.parallel_seconds / probe.single_seconds
                    self.sharing = min(1.0, max(0.0, (times - 1) / (probe.workers - 1)))
            for probe in probes:
                self.observe(probe.num_bytes, probe.parallel_seconds, probe.workers)
                self.observe(probe.num_bytes, probe.single_seconds)

    def observe_load(
        self, num_bytes: int, seconds: float, launched: bool, workers: int = 1
    ) -> None:
        """Adds a load of documents; ``launched`` means beside kernels launched one by one.

        Until `calibrated`, a load counts as at most `_FIRST` times its prediction."""
        with self._lock:
            expected = self.predict(num_bytes, workers)
            if expected and not self.calibrated:
                # the first load also pays for allocations and kernel compilation
                seconds = min(seconds, _FIRST * expected)
            if launched and self.calibrated and expected:
                # a load beside a pass is never faster than one without
                now, before = max(1.0, seconds / expected), self.slowdown
                self.slowdown = now if before is None else _MEMORY * before + (1 - _MEMORY) * now
                # the estimate is of loads without a pass
                seconds = max(seconds / self.slowdown, min(seconds, expected))
            self.calibrated = self.calibrated or not launched
            self.observe(num_bytes, seconds, workers)

    def observe(self, num_bytes: int, seconds: float, workers: int = 1) -> None:
        """Adds one measurement: each of ``workers`` read ``num_bytes`` in ``seconds``."""
        with self._lock:
            num_bytes = self._single_worker_bytes(num_bytes, workers)
            new = (1.0, float(num_bytes), num_bytes**2, seconds, num_bytes * seconds)
            self._sums = [_MEMORY * old + x for old, x in zip(self._sums, new, strict=True)]

    def predict(self, num_bytes: int, workers: int = 1) -> float | None:
        """Seconds of a load in which each worker reads ``num_bytes``; None without measurements."""
        fit = self.fit()
        return (
            None if fit is None else fit[0] + self._single_worker_bytes(num_bytes, workers) / fit[1]
        )

    def _single_worker_bytes(self, num_bytes: int, workers: int) -> int:
        """Bytes that a single worker would read in the same time."""
        return round(num_bytes * (1 + self.sharing * (workers - 1)))

    def fit(self) -> tuple[float, float] | None:
        """Latency in seconds, and bytes per second of a single worker."""
        with self._lock:
            n, x, xx, y, xy = self._sums
        if not n or not x or not y:
            return None
        spread = n * xx - x * x
        # loads of one size determine no latency
        slope = (n * xy - x * y) / spread if spread > 1e-6 * n * xx else 0.0
        latency = (y - slope * x) / n
        if slope <= 0 or latency < 0:
            slope, latency = y / x, 0.0
        return latency, 1.0 / slope

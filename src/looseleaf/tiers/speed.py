"""How fast a tier gives segments, as measured: a time for each load, and a rate.

The estimate follows what happens: every load moves it, a recent one more than an old one. Beside a
pass whose kernels are launched one by one the threads that load wait for the interpreter, so loads
take longer there: by which factor is measured too."""

import threading
from dataclasses import dataclass, field

_MEMORY = 0.8


@dataclass(eq=False)
class TierSpeed:
    """``seconds(bytes) = latency + bytes / rate``, fitted to the loads so far by least squares
    whose weights fade. May be called from several threads.

    Until anything was loaded nothing is known. ``proven`` tells whether any of it was a load of
    documents beside nothing that was launched, and ``slowdown`` how many times as long one takes
    beside such a pass; None before there was one."""

    proven: bool = False
    slowdown: float | None = None
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def observe_load(self, num_bytes: int, seconds: float, launched: bool) -> None:
        """A load of documents took that long, beside a pass whose kernels were ``launched``, or
        not."""
        with self._lock:
            expected = self.predict(num_bytes)
            if launched and self.proven and expected:
                # no less than one: what comes that soon beside a pass comes as soon without
                now, before = max(1.0, seconds / expected), self.slowdown
                self.slowdown = now if before is None else _MEMORY * before + (1 - _MEMORY) * now
                seconds /= self.slowdown
            self.proven = self.proven or not launched
            self.observe(num_bytes, seconds)

    def observe(self, num_bytes: int, seconds: float) -> None:
        """To bring that many bytes took that long."""
        with self._lock:
            new = (1.0, float(num_bytes), num_bytes**2, seconds, num_bytes * seconds)
            self._sums = [_MEMORY * old + x for old, x in zip(self._sums, new, strict=True)]

    def predict(self, num_bytes: int) -> float | None:
        """How many seconds a load of that many bytes takes; None if nothing is known."""
        fit = self.fit()
        return None if fit is None else fit[0] + num_bytes / fit[1]

    def fit(self) -> tuple[float, float] | None:
        """Seconds that a load takes however short it is, and bytes a second."""
        with self._lock:
            n, x, xx, y, xy = self._sums
        if not n or not x or not y:
            return None
        spread = n * xx - x * x
        # loads of one size tell a rate and nothing else
        slope = (n * xy - x * y) / spread if spread > 1e-6 * n * xx else 0.0
        latency = (y - slope * x) / n
        if slope <= 0 or latency < 0:
            slope, latency = y / x, 0.0
        return latency, 1.0 / slope

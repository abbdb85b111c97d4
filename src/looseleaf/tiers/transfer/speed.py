"""How fast a tier gives segments, as measured: a time for each load, and a rate.

The estimate follows what happens: every load moves it, a recent one more than an old one. Beside a
pass whose kernels are launched one by one the threads that load wait for the interpreter, so loads
take longer there: by which factor is measured too."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

_MEMORY = 0.8
# times as long as expected that a first load counts at most
_FIRST = 2.0


@dataclass(frozen=True)
class Probe:
    """Reads of ``num_bytes`` each: seconds of one ``alone``, and until the last is done of as many
    ``together`` as there are ``hands``."""

    num_bytes: int
    alone: float
    together: float
    hands: int


@dataclass(eq=False)
class TierSpeed:
    """``seconds(bytes) = latency + bytes / rate``, fitted to the loads so far by least squares
    whose weights fade. May be called from several threads.

    Bytes are those that one hand brings of several that load at a time. ``sharing`` is how much
    the hands take from each other: with 0 each has the ``rate`` of one alone, with 1, as where a
    disk or a wire is the limit, they have it together.

    Until anything was loaded nothing is known. ``proven`` tells whether any of it was a load of
    documents beside nothing that was launched, and ``slowdown`` how many times as long one takes
    beside such a pass; None before there was one."""

    proven: bool = False
    slowdown: float | None = None
    sharing: float = 0.0
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def observe_probes(self, probes: Sequence["Probe"]) -> None:
        """Reads of rising sizes, the first that are known of the tier."""
        with self._lock:
            for probe in probes:
                if probe.hands > 1:
                    times = probe.together / probe.alone
                    self.sharing = min(1.0, max(0.0, (times - 1) / (probe.hands - 1)))
            for probe in probes:
                self.observe(probe.num_bytes, probe.together, probe.hands)
                self.observe(probe.num_bytes, probe.alone)

    def observe_load(self, num_bytes: int, seconds: float, launched: bool, hands: int = 1) -> None:
        """A load of documents took that long, beside a pass whose kernels were ``launched``, or
        not. Before one is proven it counts as at most `_FIRST` times what was expected."""
        with self._lock:
            expected = self.predict(num_bytes, hands)
            if expected and not self.proven:
                # memory is taken and kernels are compiled once: that is no other load's time
                seconds = min(seconds, _FIRST * expected)
            if launched and self.proven and expected:
                # no less than one: what comes that soon beside a pass comes as soon without
                now, before = max(1.0, seconds / expected), self.slowdown
                self.slowdown = now if before is None else _MEMORY * before + (1 - _MEMORY) * now
                # it would not have taken longer without the pass
                seconds = max(seconds / self.slowdown, min(seconds, expected))
            self.proven = self.proven or not launched
            self.observe(num_bytes, seconds, hands)

    def observe(self, num_bytes: int, seconds: float, hands: int = 1) -> None:
        """To bring that many bytes took one of so many hands that long."""
        with self._lock:
            num_bytes = self._alone(num_bytes, hands)
            new = (1.0, float(num_bytes), num_bytes**2, seconds, num_bytes * seconds)
            self._sums = [_MEMORY * old + x for old, x in zip(self._sums, new, strict=True)]

    def predict(self, num_bytes: int, hands: int = 1) -> float | None:
        """How many seconds a load takes of which each of so many hands brings so many bytes; None
        if nothing is known."""
        fit = self.fit()
        return None if fit is None else fit[0] + self._alone(num_bytes, hands) / fit[1]

    def _alone(self, num_bytes: int, hands: int) -> int:
        """What one hand alone would bring in the time that so many take for that much each."""
        return round(num_bytes * (1 + self.sharing * (hands - 1)))

    def fit(self) -> tuple[float, float] | None:
        """Seconds that a load takes however short it is, and bytes a second of one hand alone."""
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

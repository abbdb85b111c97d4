"""The request rate at which a latency reaches a limit, from few measurements.

Each measurement is expensive. A binary search over a list of rates, with one measurement each,
finds the two rates around the limit. Repeated measurements of these two give means, which confirm
or move the bracket. Latency is assumed to rise with the rate, up to noise."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class Crossing:
    """Where ``measure(rate, number)`` (s) reaches ``limit`` between rising ``rates``.

    ``number`` counts earlier measurements of the rate, without the search. Latency counts as within
    the limit before the first rate, and beyond it after the last. So ``low = -1`` means that no
    rate is within the limit, ``high = len(rates)`` that none is beyond."""

    rates: Sequence[float]
    limit: float
    measure: Callable[[float, int], float]
    low: int = -1
    high: int = -1
    latencies: dict[int, list[float]] = field(default_factory=dict)

    def search(self) -> None:
        """Bracket the limit by binary search."""
        self.low, self.high = -1, len(self.rates)
        while self.high - self.low > 1:
            middle = (self.low + self.high) // 2
            within = self.measure(self.rates[middle], 0) <= self.limit
            self.low, self.high = (middle, self.high) if within else (self.low, middle)

    def refine(self) -> float:
        """Measure both rates of the bracket again; returns the rate that these two values give."""
        for number in self._bracket():
            self._measure_again(number)
        return self._interpolate({n: self.latencies[n][-1] for n in self._bracket()})

    def settle(self, repetitions: int) -> float:
        """The rate at the limit by the means.

        If the means move the bracket, its rates are measured ``repetitions`` times."""
        while True:
            means = {n: statistics.fmean(self.latencies[n]) for n in self._bracket()}
            if self.low >= 0 and means[self.low] > self.limit:
                self.low, self.high = self.low - 1, self.low
            elif self.high < len(self.rates) and means[self.high] <= self.limit:
                self.low, self.high = self.high, self.high + 1
            else:
                return self._interpolate(means)
            for number in self._bracket():
                while len(self.latencies.get(number, ())) < repetitions:
                    self._measure_again(number)

    def _bracket(self) -> list[int]:
        return [n for n in (self.low, self.high) if 0 <= n < len(self.rates)]

    def _measure_again(self, number: int) -> None:
        values = self.latencies.setdefault(number, [])
        values.append(self.measure(self.rates[number], len(values)))

    def _interpolate(self, latencies: dict[int, float]) -> float:
        """Linear interpolation within the bracket, never outside of it."""
        if self.low < 0:
            return 0.0
        if self.high == len(self.rates):
            return self.rates[self.low]
        low, high = self.rates[self.low], self.rates[self.high]
        latency_low, latency_high = latencies[self.low], latencies[self.high]
        if latency_high <= latency_low:
            return high if latency_high <= self.limit else low
        return low + min(
            1.0, max(0.0, (self.limit - latency_low) / (latency_high - latency_low))
        ) * (high - low)

"""The rate of requests at which a latency reaches a limit, from as few rates as it takes.

Rates are dear to try, those far from the limit too. So the two of a row of rates between which the
limit is reached are looked for by halving, a rate tried once each; then these two are tried again
and again, and their means say whether they are the right ones. Latency is taken to rise with the
rate, as it does but for chance."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class Crossing:
    """Of rising ``rates``, where ``measure(rate, number)`` seconds reach ``limit``; ``number`` is
    how often this rate was tried before, the search not counted.

    Before the first rate latency is taken to be within the limit, behind the last one beyond: ``low
    = -1`` and ``high = len(rates)`` mean that none was found within, or beyond."""

    rates: Sequence[float]
    limit: float
    measure: Callable[[float, int], float]
    low: int = -1
    high: int = -1
    taken: dict[int, list[float]] = field(default_factory=dict)

    def search(self) -> None:
        """Find the two rates by halving."""
        self.low, self.high = -1, len(self.rates)
        while self.high - self.low > 1:
            middle = (self.low + self.high) // 2
            within = self.measure(self.rates[middle], 0) <= self.limit
            self.low, self.high = (middle, self.high) if within else (self.low, middle)

    def refine(self) -> float:
        """Try both once more; returns the rate that these two alone say."""
        for number in self._ends():
            self._take(number)
        return self._between({n: self.taken[n][-1] for n in self._ends()})

    def settle(self, repetitions: int) -> float:
        """The rate that the means say. Where they say that the limit is not between the two, the
        neighbours are tried so often."""
        while True:
            means = {n: statistics.fmean(self.taken[n]) for n in self._ends()}
            if self.low >= 0 and means[self.low] > self.limit:
                self.low, self.high = self.low - 1, self.low
            elif self.high < len(self.rates) and means[self.high] <= self.limit:
                self.low, self.high = self.high, self.high + 1
            else:
                return self._between(means)
            for number in self._ends():
                while len(self.taken.get(number, ())) < repetitions:
                    self._take(number)

    def _ends(self) -> list[int]:
        return [n for n in (self.low, self.high) if 0 <= n < len(self.rates)]

    def _take(self, number: int) -> None:
        before = self.taken.setdefault(number, [])
        before.append(self.measure(self.rates[number], len(before)))

    def _between(self, latencies: dict[int, float]) -> float:
        """Between the two, latencies are taken to rise evenly; never outside of them."""
        if self.low < 0:
            return 0.0
        if self.high == len(self.rates):
            return self.rates[self.low]
        low, high = self.rates[self.low], self.rates[self.high]
        begun, ended = latencies[self.low], latencies[self.high]
        if ended <= begun:
            return high if ended <= self.limit else low
        return low + min(1.0, max(0.0, (self.limit - begun) / (ended - begun))) * (high - low)

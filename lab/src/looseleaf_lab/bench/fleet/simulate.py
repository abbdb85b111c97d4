"""The simulation: arrivals, steps and reports of replicas in the order of their times.

Replicas are chosen by the product's own `looseleaf.router`, with reports that lag as in a fleet."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any, Literal

import numpy as np

from looseleaf.router import Affinity, LoadLimits, Router
from looseleaf_lab.bench.fleet.costs import Costs
from looseleaf_lab.bench.fleet.replica import Replica, Running
from looseleaf_lab.bench.fleet.requests import FleetRequest
from looseleaf_lab.bench.results import Row

Policy = Literal["documents", "hash", "round robin", "least load", "one engine"]
POLICIES: tuple[Policy, ...] = ("documents", "hash", "round robin", "least load", "one engine")
"""``documents`` routes by reports and by hash, ``hash`` without reports. ``one engine`` is a single
replica with the room, and the speed, of all."""


@dataclass(frozen=True)
class FleetConfig:
    """``replicas`` with room for ``room`` tokens each, in whole pages. ``shared`` adds a tier that
    keeps every document. Replicas report after ``report_seconds``.

    ``clients`` send one request after another, without regard to the times of arrival."""

    replicas: int = 3
    room: int = 60 * 512
    shared: bool = False
    policy: Policy = "documents"
    report_seconds: float = 1.0
    clients: int | None = None
    limits: LoadLimits = field(default_factory=LoadLimits)


class Simulation:
    """One run. `run` returns its figures."""

    def __init__(self, config: FleetConfig, costs: Costs) -> None:
        self.config, self.costs, self.now = config, costs, 0.0
        number, room = config.replicas, config.room
        if config.policy == "one engine":
            number, room = 1, room * number
        self.replicas = [Replica(f"r{n}", costs, room) for n in range(number)]
        self._by_name = {replica.name: replica for replica in self.replicas}
        self._names = list(self._by_name)
        self.tier: set[int] | None = set() if config.shared else None
        self._router = Router(lambda: self.now, config.limits)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self._turn, self._left, self._outside = count(), 0, 0, 0
        self._queue: Iterator[FleetRequest] = iter(())
        self.first_tokens: list[float] = []
        self.written_tokens = 0

    def run(self, requests: Sequence[FleetRequest]) -> Row:
        """The figures of the last four fifths of the requests; the first fifth fills the pools."""
        self._left = len(requests)
        self._queue = iter(requests)
        if self.config.clients is None:
            for request in self._queue:
                self._at(request.arrival, self._arrival(request))
        for request in islice(self._queue, self.config.clients):
            self._at(0.0, self._arrival(request))
        if self.config.policy == "documents":
            self._at(0.0, self._report)
        while self._events and self._left:
            self.now, _, act = heapq.heappop(self._events)
            act()
        return self._figures(requests)

    def _at(self, moment: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._order), act))

    def _arrival(self, request: FleetRequest) -> Callable[[], None]:
        def act() -> None:
            affinity = Affinity(tuple((str(n), tokens) for n, tokens in request.documents))
            replica, begin = self._choose(affinity), self.now
            self._router.begin(replica.name, affinity)
            self._spend(self.costs.overhead, lambda: self._admit(replica, request, begin))

        return act

    def _admit(self, replica: Replica, request: FleetRequest, begin: float) -> None:
        replica.admit(request, begin, self.now, self.tier)
        self._wake(replica)

    def _spend(self, seconds: float, act: Callable[[], None]) -> None:
        """Call ``act`` after work outside of the engines."""
        self._outside += 1

        def end() -> None:
            self._outside -= 1
            act()

        self._at(self.now + seconds * self.costs.share(self._busy()), end)

    def _busy(self) -> int:
        return self._outside + sum(replica.stepping for replica in self.replicas)

    def _choose(self, affinity: Affinity) -> Replica:
        policy = self.config.policy
        if policy in ("round robin", "one engine"):
            self._turn += 1
            return self.replicas[self._turn % len(self.replicas)]
        keys = Affinity() if policy == "least load" else affinity
        return self._by_name[self._router.order(keys, self._names)[0]]

    def _report(self) -> None:
        for replica in self.replicas:
            self._router.report(replica.name, replica.documents())
        self._at(self.now + self.config.report_seconds, self._report)

    def _wake(self, replica: Replica) -> None:
        if replica.stepping:
            return
        step = replica.begin_step(self.now, 1 + self._busy())
        if step is None:
            moment = replica.next_ready()
            if moment is not None and moment > self.now:
                self._at(moment, lambda: self._wake(replica))
            return
        seconds, chunks = step
        replica.stepping = True
        self._at(self.now + seconds, lambda: self._end(replica, chunks))

    def _end(self, replica: Replica, chunks: list[tuple[Running, int]]) -> None:
        replica.stepping = False
        for running in replica.end_step(self.now, chunks, self.tier):
            self._router.end(replica.name)
            self._left -= 1
            assert running.first_token is not None
            delay = self.costs.first_delay
            self.first_tokens.append(running.first_token - running.begin + delay)
            following = next(self._queue, None)
            if following is not None:
                self._at(self.now, self._arrival(following))
        if self.tier is not None:
            self.written_tokens += sum(
                tokens
                for running, _ in chunks
                if running.pending <= 0
                for document, tokens in running.request.documents
                if document in running.owned
            )
        self._wake(replica)

    def _figures(self, requests: Sequence[FleetRequest]) -> Row:
        documents = sum(r.document_tokens for r in self.replicas)
        computed = sum(r.computed_tokens for r in self.replicas)
        loaded = sum(r.loaded_tokens for r in self.replicas)
        loads = [replica.requests for replica in self.replicas]
        tokens = documents + sum(r.text_tokens + r.output_tokens for r in requests)
        steady = self.first_tokens[len(self.first_tokens) // 5 :]
        dollars = self.config.replicas * self.costs.hourly * self.now / 3600
        return {
            "policy": self.config.policy,
            "replicas": self.config.replicas,
            "tier": "shared" if self.config.shared else "none",
            "requests": len(requests),
            "hits": 1.0 - computed / max(1, documents),
            "first_token_p50": float(np.median(steady)),
            "first_token_p99": float(np.quantile(steady, 0.99)),
            "load_over_mean": max(loads) * len(loads) / max(1, sum(loads)),
            "gb_moved": (loaded + self.written_tokens) * self.costs.bytes_per_token / 1e9,
            "dollars_per_million": 1e6 * dollars / max(1, tokens),
            "lost": 0,
            "refused": 0,
            "wrong": 0,
        }


def simulate(
    requests: Sequence[FleetRequest], config: FleetConfig, costs: Costs, **changes: Any
) -> Row:
    """The figures of one fleet; ``changes`` replace fields of ``config``."""
    config = replace(config, **changes)
    if config.policy == "one engine":
        # as fast as all replicas together
        speed = 1 / config.replicas
        costs = replace(costs, prefill=costs.prefill * speed, row=costs.row * speed)
    return Simulation(config, costs).run(requests)

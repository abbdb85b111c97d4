"""A simulated replica: steps of continuous batching, and a pool with the product's eviction.

The pool holds documents, and also the texts of requests, which a later request may begin with."""

from collections import deque
from dataclasses import dataclass, field

from looseleaf.kv.segmented_lru import SegmentedLru
from looseleaf_lab.bench.fleet.costs import Costs
from looseleaf_lab.bench.fleet.requests import FleetRequest

PAGE = 16
"""Tokens of a page, the unit of the pool."""


@dataclass(eq=False)
class Running:
    """A request at a replica. ``awaits`` are documents that load or that another request computes.

    ``pending`` are the new tokens that it computes itself, ``owned`` its documents among them."""

    request: FleetRequest
    pending: int
    owned: list[int]
    awaits: set[int]
    ready_at: float
    output_left: int
    begin: float
    first_token: float | None = None


@dataclass(eq=False)
class Replica:
    """One replica with room for ``room`` tokens. Keys of the pool are documents if not negative."""

    name: str
    costs: Costs
    room: int
    active: list[Running] = field(default_factory=list)
    waiting: deque[Running] = field(default_factory=deque)
    pool: SegmentedLru[int] = field(init=False)
    computing: set[int] = field(default_factory=set)
    stepping: bool = False
    requests: int = 0
    document_tokens: int = 0
    computed_tokens: int = 0
    loaded_tokens: int = 0
    _texts: int = 0
    _sizes: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = SegmentedLru(self.room)

    def admit(
        self, request: FleetRequest, begin: float, now: float, tier: set[int] | None
    ) -> Running:
        """Admit a request that began at ``begin``: its documents are in the pool, in the ``tier``,
        or new."""
        owned, awaits, pending, ready = list[int](), set[int](), request.text_tokens, now
        for document, tokens in request.documents:
            self.document_tokens += tokens
            if document in self.pool:
                self.pool.remove(document)
                self.pool.add(document, self._sizes[document], reused=True)
            elif document in self.computing:
                awaits.add(document)
            elif tier is not None and document in tier:
                ready = max(ready, now + self.costs.load_seconds(tokens))
                self.loaded_tokens += tokens
                self._insert(document, tokens)
            else:
                owned.append(document)
                self.computing.add(document)
                pending += tokens
                self.computed_tokens += tokens
        running = Running(request, pending, owned, awaits, ready, request.output_tokens, begin)
        self.requests += 1
        self.waiting.append(running)
        return running

    def begin_step(self, now: float, busy: int) -> tuple[float, list[tuple[Running, int]]] | None:
        """The duration of the next step and its new tokens per request; None without work."""
        while self.waiting and len(self.active) < _MOST_RUNNING:
            self.active.append(self.waiting.popleft())
        budget, chunks, rows = self.costs.step_tokens, list[tuple[Running, int]](), 0
        for running in self.active:
            if running.first_token is not None:
                rows += 1
            elif running.ready_at <= now and not running.awaits & self.computing and budget > 0:
                taken = min(budget, running.pending)
                chunks.append((running, taken))
                budget -= taken
        if not chunks and not rows:
            return None
        new = sum(tokens for _, tokens in chunks)
        return self.costs.step_seconds(new, len(chunks), rows + len(chunks), busy), chunks

    def end_step(
        self, now: float, chunks: list[tuple[Running, int]], tier: set[int] | None
    ) -> list[Running]:
        """Record a step that ends now; the requests that ended with it."""
        ended = []
        for running in [r for r in self.active if r.first_token is not None]:
            running.output_left -= 1
        for running, tokens in chunks:
            running.pending -= tokens
            if running.pending <= 0:
                running.first_token = now
                running.output_left -= 1
                sizes = dict(running.request.documents)
                for document in running.owned:
                    self.computing.discard(document)
                    self._insert(document, sizes[document])
                    if tier is not None:
                        tier.add(document)
        for running in list(self.active):
            if running.first_token is not None and running.output_left <= 0:
                self.active.remove(running)
                ended.append(running)
                text = running.request.text_tokens // PAGE * PAGE
                if text:
                    self._texts += 1
                    self._insert(-self._texts, text)
        return ended

    def next_ready(self) -> float | None:
        """When the next load ends, for a replica without work until then."""
        times = [r.ready_at for r in self.active if r.first_token is None]
        return min(times, default=None)

    def documents(self) -> dict[str, int]:
        """The tokens of the documents in the pool, as a report to a router."""
        return {str(key): self._sizes[key] for key in self.pool if key >= 0}

    def _insert(self, key: int, tokens: int) -> None:
        whole = -(-tokens // PAGE) * PAGE
        self._sizes[key] = whole
        self.pool.add(key, whole, reused=False)
        while self.pool.size > self.room and len(self.pool) > 1:
            del self._sizes[self.pool.pop()]


_MOST_RUNNING = 256

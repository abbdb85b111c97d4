"""Requests of a fleet: documents by popularity, or the blocks of a Mooncake trace."""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from looseleaf_lab.bench.endpoint.trace import BLOCK, TraceLine


@dataclass(frozen=True)
class FleetRequest:
    """A request: its arrival (s), documents with their tokens, and lengths of text and answer."""

    arrival: float
    documents: tuple[tuple[int, int], ...]
    text_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class ZipfConfig:
    """Requests that arrive at ``rate`` a second; document ``n`` has the weight ``n ** -alpha``."""

    requests: int = 3000
    documents: int = 300
    alpha: float = 1.0
    per_request: int = 1
    document_tokens: int = 512
    text_tokens: int = 32
    output_tokens: int = 8
    rate: float = 20.0
    seed: int = 0


def zipf_requests(config: ZipfConfig) -> list[FleetRequest]:
    """Poisson arrivals. The numbers of documents are shuffled, so that they say nothing."""
    source = random.Random(config.seed)
    numbers = list(range(config.documents))
    source.shuffle(numbers)
    sums = list(accumulate(rank**-config.alpha for rank in range(1, config.documents + 1)))
    requests, now = [], 0.0
    for _ in range(config.requests):
        now += source.expovariate(config.rate)
        chosen: dict[int, None] = {}
        while len(chosen) < min(config.per_request, config.documents):
            chosen[source.choices(numbers, cum_weights=sums)[0]] = None
        documents = tuple((number, config.document_tokens) for number in chosen)
        requests.append(FleetRequest(now, documents, config.text_tokens, config.output_tokens))
    return requests


def trace_requests(lines: Iterable[TraceLine], speed: float = 1.0) -> list[FleetRequest]:
    """The full blocks of each prompt are documents; arrivals are ``speed`` times as fast."""
    entries = list(lines)
    start = entries[0].timestamp if entries else 0.0
    requests = []
    for entry in entries:
        *shared, _ = entry.hash_ids
        blocks = tuple((block, BLOCK) for block in dict.fromkeys(shared))
        text = entry.input_length - BLOCK * len(shared)
        arrival = (entry.timestamp - start) / 1e3 / speed
        requests.append(FleetRequest(arrival, blocks, text, entry.output_length))
    return requests

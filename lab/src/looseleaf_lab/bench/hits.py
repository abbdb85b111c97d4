"""``bench hits``: hit ratios of a memory budget with documents stored once, once per position, or
as prefixes (LazyAttention, arXiv 2606.04302, table of hit ratios).

Requests draw documents by Zipf's law, in random order. Keys come from the engine's `KeySpace` and
pages from its `SegmentStore`, so admission, references and LRU eviction are the engine's. Only keys
and values are left out. The paper's trace is not public, and most of its requests are for new
documents. Its figures are therefore lower: compare their order, not their values."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import NamedTuple

import torch

from looseleaf.kv.keys import KeySpace, SegmentKey
from looseleaf.kv.pool import PagePool
from looseleaf.kv.store import SegmentStore
from looseleaf_lab.bench.progress import SILENT, Progress
from looseleaf_lab.bench.results import Row

PAGE_SIZE = 64
BLENDED = 0.18  # share of reused tokens that the paper's CacheBlend column counts as missed

PAPER: dict[tuple[float, float], dict[str, float]] = {
    (1.0, 2.1): {"prefix": 0.0, "cacheblend": 5.96, "copies": 7.27, "once": 13.57},
    (1.0, 1.1): {"prefix": 0.0, "cacheblend": 1.51, "copies": 1.84, "once": 3.47},
    (10.0, 1.5): {"prefix": 0.55, "cacheblend": 17.33, "copies": 21.13, "once": 23.89},
    (50.0, 1.5): {"prefix": 1.95, "cacheblend": 21.87, "copies": 26.67, "once": 28.44},
}
"""Percent by GB and Zipf exponent, from the paper's columns Prefix, CacheBlend, Block-Attn and
LazyAttn. The CacheBlend column is 0.82 of Block-Attn: recomputed tokens seem to count as missed."""


@dataclass(frozen=True)
class HitsConfig:
    """``documents`` of ``document_tokens`` each; ``ragged`` varies lengths by up to a half.

    A request reads ``per_request`` documents. The first ``skipped`` requests fill the cache and are
    not counted. ``kib_per_token`` is 128 for Llama-3.1-8B in bf16."""

    documents: int = 1000
    document_tokens: int = 512
    per_request: int = 5
    requests: int = 2000
    skipped: int = 400
    kib_per_token: float = 128.0
    ragged: bool = False
    seed: int = 0

    def capacity(self, gigabytes: float) -> int:
        """Pages in a budget."""
        return max(1, int(gigabytes * 2**20 / self.kib_per_token) // PAGE_SIZE)


@dataclass(frozen=True)
class PlacedDocument:
    """A document of a request: number, length, and offset in the prompt."""

    number: int
    length: int
    offset: int

    @property
    def tokens(self) -> tuple[int, ...]:
        return (self.number,) * self.length


class StoredDocument(NamedTuple):
    """A document's length, and the keys and lengths of its segments."""

    length: int
    segments: list[tuple[SegmentKey, int]]


Identities = Callable[[KeySpace, Sequence[PlacedDocument]], Iterator[StoredDocument]]
"""Yields the stored documents of a request."""


def stored_once(keys: KeySpace, request: Sequence[PlacedDocument]) -> Iterator[StoredDocument]:
    """As in this engine: a document is one segment at any position."""
    for document in request:
        key = keys.document(keys.root, document.tokens)
        yield StoredDocument(document.length, [(key, document.length)])


def stored_per_position(
    keys: KeySpace, request: Sequence[PlacedDocument]
) -> Iterator[StoredDocument]:
    """As in serving Block-Attention: keys are rotated for a position, so each has a copy."""
    for document in request:
        salted = keys.salted(f"position {document.offset}")
        key = salted.document(salted.root, document.tokens)
        yield StoredDocument(document.length, [(key, document.length)])


def stored_as_prefixes(
    keys: KeySpace, request: Sequence[PlacedDocument]
) -> Iterator[StoredDocument]:
    """Prefix caching: whole pages, each keyed by the chain of all pages before it."""
    context, tokens = keys.root, [token for document in request for token in document.tokens]
    pages = []
    for start in range(0, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE):
        context = keys.text_page(context, tokens[start : start + PAGE_SIZE])
        pages.append((context, PAGE_SIZE))
    yield StoredDocument(len(tokens), pages)


CACHES: dict[str, Identities] = {
    "once": stored_once,
    "copies": stored_per_position,
    "prefix": stored_as_prefixes,
}


def trace(config: HitsConfig, alpha: float) -> list[list[PlacedDocument]]:
    """The requests: distinct documents by popularity, in random order, contiguous."""
    rng = random.Random(f"{config.seed} {alpha}")
    half = config.document_tokens // 2
    lengths = [
        config.document_tokens + (rng.randint(-half, half) if config.ragged else 0)
        for _ in range(config.documents)
    ]
    orders = by_popularity(rng, config.documents, config.per_request, alpha)
    requests = []
    for order in islice(orders, config.requests):
        starts = accumulate((lengths[n] for n in order), initial=0)
        requests.append(
            [PlacedDocument(n, lengths[n], start) for n, start in zip(order, starts, strict=False)]
        )
    return requests


def by_popularity(
    rng: random.Random, documents: int, per_request: int, alpha: float
) -> Iterator[list[int]]:
    """An endless series of requests: distinct documents by Zipf's law, in random order."""
    weights = list(accumulate(rank**-alpha for rank in range(1, documents + 1)))
    while True:
        documents_of_request: dict[int, None] = {}
        while len(documents_of_request) < per_request:
            (number,) = rng.choices(range(documents), cum_weights=weights)
            documents_of_request[number] = None
        yield rng.sample(list(documents_of_request), len(documents_of_request))


def hit_ratio(
    config: HitsConfig, cache: str, pages: int, requests: Sequence[Sequence[PlacedDocument]]
) -> float:
    """Share of the documents' tokens that were already in a pool of ``pages``."""
    store = make_store(pages)
    keys = KeySpace.create(model=b"", rope=b"", kv_dtype="", salt="", page_size=PAGE_SIZE)
    hits = tokens = 0
    for number, request in enumerate(requests):
        found_tokens, request_tokens = _serve(store, CACHES[cache](keys, request))
        if number >= config.skipped:
            hits, tokens = hits + found_tokens, tokens + request_tokens
    store.check(())
    return hits / tokens


def make_store(pages: int) -> SegmentStore:
    """A store over a pool with tiny pages."""
    return SegmentStore(
        PagePool(
            num_pages=pages,
            page_size=PAGE_SIZE,
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            dtype=torch.float16,
            device=torch.device("cpu"),
        )
    )


def _serve(store: SegmentStore, stored_documents: Iterator[StoredDocument]) -> tuple[int, int]:
    """Hit tokens and all tokens of one request. Missing segments are stored if the pool has pages
    left."""
    references, missing = [], []
    hits = total = 0
    for length, segments in stored_documents:
        total += length
        for key, tokens in segments:
            segment = store.find(key)
            if segment is not None:
                references.append(store.acquire(segment))
                hits += tokens
            else:
                missing.append((key, tokens))
    for key, tokens in missing:
        pages = store.reserve(-(-tokens // PAGE_SIZE))
        if pages is not None:
            references.append(store.insert(key, tokens, pages, ready=True))
    # eviction is LRU: release in reverse, so that a chain loses its end first
    for segment in reversed(references):
        store.release(segment)
    return hits, total


def closed_form(documents: int, capacity: int, alpha: float) -> float:
    """Share of draws for the ``capacity`` most popular of ``documents``."""
    weights: list[float] = [rank**-alpha for rank in range(1, documents + 1)]
    return sum(weights[:capacity]) / sum(weights)


def gain_in_closed_form(capacity: int, positions: int, alpha: float) -> float:
    """The paper's gain: hits with room for ``capacity`` documents over hits with room for
    ``capacity // positions``."""
    weights: list[float] = [rank**-alpha for rank in range(1, capacity + 1)]
    return sum(weights) / sum(weights[: capacity // positions])


def measure(
    config: HitsConfig,
    budgets: Sequence[float],
    alphas: Sequence[float],
    progress: Progress = SILENT,
) -> Iterator[Row]:
    """Rows of every cache at every budget and skew, on the same requests."""
    for alpha in progress.over(alphas, lambda alpha: f"alpha {alpha}"):
        requests = trace(config, alpha)
        for budget in progress.over(budgets, lambda budget: f"{budget} GB"):
            pages = config.capacity(budget)
            ratios = {
                name: hit_ratio(config, name, pages, requests) for name in progress.over(CACHES)
            }
            # by the paper's count, for copies and for one copy with a patch
            reused = ratios | {"cacheblend": ratios["copies"] * (1 - BLENDED)}
            reused["blended once"] = ratios["once"] * (1 - BLENDED)
            for name, share in reused.items():
                yield _row(config, budget, alpha, name, share)


def _row(config: HitsConfig, budget: float, alpha: float, cache: str, share: float) -> Row:
    capacity = config.capacity(budget) * PAGE_SIZE // config.document_tokens
    copies = capacity // config.per_request
    capacities = {"once": capacity, "copies": copies}
    closed = closed_form(config.documents, capacities[cache], alpha) if cache in capacities else ""
    return {
        "documents": config.documents,
        "document_tokens": config.document_tokens,
        "lengths": "ragged" if config.ragged else "equal",
        "per_request": config.per_request,
        "requests": config.requests - config.skipped,
        "alpha": alpha,
        "budget_gb": budget,
        "documents_held": capacity,
        "cache": cache,
        "reused": share,
        "closed_form": closed,
        "paper": PAPER.get((budget, alpha), {}).get(cache, ""),
    }

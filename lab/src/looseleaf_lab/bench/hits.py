"""``bench hits``: what a budget of memory holds when documents are stored once, once a position, or
as prefixes: the claim of LazyAttention (arXiv 2606.04302, its table of hit ratios).

Requests draw documents by Zipf's law and order them at random. Identities come from the engine's
`KeySpace` and memory from its `SegmentStore`, so admission, references and eviction (least recently
used) are those of the engine; only keys and values are left out. The paper's own trace is not
public, and its ratios are lower, since most of its requests ask for something new: its figures
stand beside ours for their order, not to be met."""

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
BLENDED = 0.18  # of the tokens of reused documents count as missed in the paper's CacheBlend

PAPER: dict[tuple[float, float], dict[str, float]] = {
    (1.0, 2.1): {"prefix": 0.0, "cacheblend": 5.96, "copies": 7.27, "once": 13.57},
    (1.0, 1.1): {"prefix": 0.0, "cacheblend": 1.51, "copies": 1.84, "once": 3.47},
    (10.0, 1.5): {"prefix": 0.55, "cacheblend": 17.33, "copies": 21.13, "once": 23.89},
    (50.0, 1.5): {"prefix": 1.95, "cacheblend": 21.87, "copies": 26.67, "once": 28.44},
}
"""Percent by GB and Zipf's exponent: its columns Prefix, CacheBlend, Block-Attn, LazyAttn. Its
CacheBlend column is its Block-Attn column times 0.82: as it seems, what is computed again counts as
missed."""


@dataclass(frozen=True)
class HitsConfig:
    """A world of ``documents`` of ``document_tokens`` each (if ``ragged``, of half as many to half
    as many again), of which a request takes ``per_request``. The first ``skipped`` requests fill
    the cache and are not counted. ``kib_per_token`` is 128 for Llama-3.1-8B in bf16."""

    documents: int = 1000
    document_tokens: int = 512
    per_request: int = 5
    requests: int = 2000
    skipped: int = 400
    kib_per_token: float = 128.0
    ragged: bool = False
    seed: int = 0

    def capacity(self, gigabytes: float) -> int:
        """Pages that a budget holds."""
        return max(1, int(gigabytes * 2**20 / self.kib_per_token) // PAGE_SIZE)


@dataclass(frozen=True)
class Placed:
    """A document of a request: which it is, its length, and where it begins."""

    number: int
    length: int
    offset: int

    @property
    def tokens(self) -> tuple[int, ...]:
        return (self.number,) * self.length


class Stored(NamedTuple):
    """A document's tokens, and the keys and lengths of the segments that hold them."""

    length: int
    segments: list[tuple[SegmentKey, int]]


Identities = Callable[[KeySpace, Sequence[Placed]], Iterator[Stored]]
"""What is stored for a request."""


def stored_once(keys: KeySpace, request: Sequence[Placed]) -> Iterator[Stored]:
    """As here: a document is one segment wherever it stands."""
    for placed in request:
        key = keys.document(keys.root, placed.tokens)
        yield Stored(placed.length, [(key, placed.length)])


def stored_per_position(keys: KeySpace, request: Sequence[Placed]) -> Iterator[Stored]:
    """As Block-Attention's serving does: keys are rotated for a position, so each has a copy."""
    for placed in request:
        at = keys.salted(f"position {placed.offset}")
        key = at.document(at.root, placed.tokens)
        yield Stored(placed.length, [(key, placed.length)])


def stored_as_prefixes(keys: KeySpace, request: Sequence[Placed]) -> Iterator[Stored]:
    """Ordinary prefix caching: whole pages, each under the chain of all before it."""
    context, tokens = keys.root, [token for placed in request for token in placed.tokens]
    pages = []
    for start in range(0, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE):
        context = keys.text_page(context, tokens[start : start + PAGE_SIZE])
        pages.append((context, PAGE_SIZE))
    yield Stored(len(tokens), pages)


CACHES: dict[str, Identities] = {
    "once": stored_once,
    "copies": stored_per_position,
    "prefix": stored_as_prefixes,
}


def trace(config: HitsConfig, alpha: float) -> list[list[Placed]]:
    """The requests: distinct documents by popularity, in random order, one behind the other."""
    rng = random.Random(f"{config.seed} {alpha}")
    half = config.document_tokens // 2
    lengths = [
        config.document_tokens + (rng.randint(-half, half) if config.ragged else 0)
        for _ in range(config.documents)
    ]
    drawn = by_popularity(rng, config.documents, config.per_request, alpha)
    requests = []
    for order in islice(drawn, config.requests):
        starts = accumulate((lengths[n] for n in order), initial=0)
        requests.append([Placed(n, lengths[n], at) for n, at in zip(order, starts, strict=False)])
    return requests


def by_popularity(
    rng: random.Random, documents: int, per_request: int, alpha: float
) -> Iterator[list[int]]:
    """Distinct documents of one request after another, by Zipf's law, in random order."""
    weights = list(accumulate(rank**-alpha for rank in range(1, documents + 1)))
    while True:
        chosen: dict[int, None] = {}
        while len(chosen) < per_request:
            (pick,) = rng.choices(range(documents), cum_weights=weights)
            chosen[pick] = None
        yield rng.sample(list(chosen), len(chosen))


def hit_ratio(
    config: HitsConfig, cache: str, pages: int, requests: Sequence[Sequence[Placed]]
) -> float:
    """The share of the documents' tokens that a pool of ``pages`` already had."""
    store = make_store(pages)
    keys = KeySpace.create(model=b"", rope=b"", kv_dtype="", salt="", page_size=PAGE_SIZE)
    found = total = 0
    for number, request in enumerate(requests):
        hit, asked = _serve(store, CACHES[cache](keys, request))
        if number >= config.skipped:
            found, total = found + hit, total + asked
    store.check(())
    return found / total


def make_store(pages: int) -> SegmentStore:
    """A store over a pool whose pages hold next to nothing."""
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


def _serve(store: SegmentStore, documents: Iterator[Stored]) -> tuple[int, int]:
    """One request: tokens found and asked for. What is missing is stored if there is room beside
    what the request itself reads."""
    held, missing = [], []
    found = total = 0
    for length, segments in documents:
        total += length
        for key, tokens in segments:
            segment = store.find(key)
            if segment is not None:
                held.append(store.acquire(segment))
                found += tokens
            else:
                missing.append((key, tokens))
    for key, tokens in missing:
        pages = store.reserve(-(-tokens // PAGE_SIZE))
        if pages is not None:
            held.append(store.insert(key, tokens, pages, ready=True))
    # the last to be let go is the last to be evicted: a chain never loses its beginning first
    for segment in reversed(held):
        store.release(segment)
    return found, total


def closed_form(documents: int, capacity: int, alpha: float) -> float:
    """Share of the draws that the ``capacity`` most popular of ``documents`` take."""
    weights: list[float] = [rank**-alpha for rank in range(1, documents + 1)]
    return sum(weights[:capacity]) / sum(weights)


def gain_in_closed_form(capacity: int, positions: int, alpha: float) -> float:
    """The paper's ratio of hit ratios: ``capacity`` documents held, against a ``positions``-th."""
    weights: list[float] = [rank**-alpha for rank in range(1, capacity + 1)]
    return sum(weights) / sum(weights[: capacity // positions])


def measure(
    config: HitsConfig,
    budgets: Sequence[float],
    alphas: Sequence[float],
    progress: Progress = SILENT,
) -> Iterator[Row]:
    """Rows of the table: every cache at every budget and skew, on the same requests."""
    for alpha in progress.over(alphas, lambda alpha: f"alpha {alpha}"):
        requests = trace(config, alpha)
        for budget in progress.over(budgets, lambda budget: f"{budget} GB"):
            pages = config.capacity(budget)
            ratios = {
                name: hit_ratio(config, name, pages, requests) for name in progress.over(CACHES)
            }
            # as the paper counts it, beside what one copy and a patch give here
            reused = ratios | {"cacheblend": ratios["copies"] * (1 - BLENDED)}
            reused["blended once"] = ratios["once"] * (1 - BLENDED)
            for name, share in reused.items():
                yield _row(config, budget, alpha, name, share)


def _row(config: HitsConfig, budget: float, alpha: float, cache: str, share: float) -> Row:
    held = config.capacity(budget) * PAGE_SIZE // config.document_tokens
    copies = held // config.per_request
    forms = {"once": held, "copies": copies}
    form = closed_form(config.documents, forms[cache], alpha) if cache in forms else ""
    return {
        "documents": config.documents,
        "document_tokens": config.document_tokens,
        "lengths": "ragged" if config.ragged else "equal",
        "per_request": config.per_request,
        "requests": config.requests - config.skipped,
        "alpha": alpha,
        "budget_gb": budget,
        "documents_held": held,
        "cache": cache,
        "reused": share,
        "closed_form": form,
        "paper": PAPER.get((budget, alpha), {}).get(cache, ""),
    }

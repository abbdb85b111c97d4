"""``bench reuse``: documents by popularity in random order, against prefix caching and the closed
form of LazyAttention (arXiv 2606.04302).

A position-free cache of C documents holds the C most popular ones at best. With one copy for each
of D positions, it holds C/D documents. Prefix caching helps only if a whole prompt begins like an
earlier one. The closed forms assume an ideal cache; ours is LRU."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.llm.llm import LLM
from looseleaf.prompt.request import Document, DocumentContext
from looseleaf.sampling_params import SamplingParams
from looseleaf_lab.bench.hits import closed_form
from looseleaf_lab.bench.progress import SILENT, Progress
from looseleaf_lab.bench.results import Row


@dataclass(frozen=True)
class ReuseConfig:
    """A request reads ``per_request`` of ``documents``, drawn by Zipf's law with ``alpha``.

    The page pool has room for ``capacity`` documents and the running request."""

    model: Path
    name: str
    documents: int = 100
    per_request: int = 5
    capacity: int = 20
    alpha: float = 1.1
    requests: int = 200
    skipped: int = 40
    seed: int = 0


def measure(
    config: ReuseConfig,
    texts: Sequence[str],
    questions: Sequence[str],
    progress: Progress = SILENT,
) -> list[Row]:
    """One row for reuse at any position and one for prefix caching, on the same requests.

    ``texts`` has one text per document. The first ``skipped`` requests fill the cache and are not
    counted."""
    requests = _requests(config, texts, questions)
    rows: list[Row] = []
    contexts: tuple[DocumentContext, ...] = ("lead", "prompt")
    for context in progress.over(contexts, lambda context: f"documents of context {context}"):
        llm = _llm_with_capacity(config, requests)
        outputs = [
            _answer(llm, request, context)
            for request in progress.over(requests, lambda request: "a request")
        ]
        llm.engine.check()
        rows.append(_row(config, context, outputs[config.skipped :], llm))
    return rows


def _requests(
    config: ReuseConfig, texts: Sequence[str], questions: Sequence[str]
) -> list[tuple[list[Document], str]]:
    """Requests with distinct documents by popularity, in random order."""
    rng = random.Random(config.seed)
    weights = [rank**-config.alpha for rank in range(1, config.documents + 1)]
    requests = []
    for number in range(config.requests):
        numbers: list[int] = []
        while len(numbers) < config.per_request:
            (number_drawn,) = rng.choices(range(config.documents), weights)
            if number_drawn not in numbers:
                numbers.append(number_drawn)
        rng.shuffle(numbers)
        question = questions[number % len(questions)]
        requests.append(([Document(texts[n], name=f"document {n}") for n in numbers], question))
    return requests


def _llm_with_capacity(config: ReuseConfig, requests: Sequence[tuple[list[Document], str]]) -> LLM:
    """A model whose pool has room for ``capacity`` average documents and one running request."""
    llm = LLM(config.model, num_pages=1)
    tokenizer, page_size = llm.engine.tokenizer, llm.engine.config.cache.page_size
    lengths = [
        sum(len(tokenizer.encode_document(text)) for text in document.texts)
        for documents, _ in requests[: config.skipped]
        for document in documents
    ]
    pages = statistics.fmean(-(-length // page_size) for length in lengths)
    request_pages = config.per_request * max(-(-length // page_size) for length in lengths) + 16
    return LLM(config.model, num_pages=round(config.capacity * pages) + request_pages)


def _answer(
    llm: LLM, request: tuple[Sequence[Document], str], context: DocumentContext
) -> RequestOutput:
    documents, question = request
    parts = [*(Document(d.text, d.name, context) for d in documents), question]
    params = SamplingParams(temperature=0.0, max_tokens=1)
    (output,) = llm.chat([[{"role": "user", "content": parts}]], params)
    return output


def _row(
    config: ReuseConfig, context: DocumentContext, outputs: Sequence[RequestOutput], llm: LLM
) -> Row:
    pool = llm.engine.store.pool
    segment_pages = [len(segment.pages) for segment in llm.engine.store.segments()]
    # a document takes several pages, a cached prefix one page per segment
    document_pages = [pages for pages in segment_pages if pages > 1]
    kib_per_page = pool.bytes_per_page / 1024
    if context == "lead":
        reports = [o.reuse for o in outputs]
        hits = sum(d.source != "computed" for r in reports for d in r.documents)
        hit_ratio = hits / sum(len(r.documents) for r in reports)
        reused = sum(r.document_tokens_reused for r in reports)
        total = sum(r.document_tokens for r in reports)
        bound = closed_form(config.documents, config.capacity, config.alpha)
    else:
        reused = sum(o.reuse.text_tokens_cached for o in outputs)
        total = sum(o.reuse.text_tokens for o in outputs)
        hit_ratio = reused / total
        copies = config.capacity // config.per_request
        bound = closed_form(config.documents, copies, config.alpha)
    first = [o.metrics.first_token or 0.0 for o in outputs]
    return {
        "model": config.name,
        "cache": "documents, any position" if context == "lead" else "prefix caching",
        "documents": config.documents,
        "per_request": config.per_request,
        "capacity": config.capacity,
        "alpha": config.alpha,
        "requests": len(outputs),
        "hit_ratio": hit_ratio,
        "closed_form": bound,
        "tokens_reused": reused / total,
        "documents_held": len(document_pages),
        "kib_per_document": statistics.fmean(document_pages) * kib_per_page
        if document_pages
        else 0.0,
        "kib_held": sum(segment_pages) * kib_per_page,
        "first_token_ms": 1e3 * statistics.median(first),
    }

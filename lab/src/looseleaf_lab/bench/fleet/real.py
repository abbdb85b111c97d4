"""The same requests at real servers, and the costs of the simulation as measured there."""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import httpx
import numpy as np

from looseleaf_lab.bench.endpoint.workload import words
from looseleaf_lab.bench.fleet.costs import Costs
from looseleaf_lab.bench.fleet.requests import FleetRequest
from looseleaf_lab.bench.results import Row

MODEL = "looseleaf-reference"
_SAMPLES = 12


@dataclass(frozen=True)
class Timed:
    """One real request: seconds to the first token and to the end, and its document tokens."""

    server: str
    first_token: float
    total: float
    tokens: int
    computed: int


@dataclass(frozen=True)
class Texts:
    """Real texts for the numbers of documents; ``words_per_token`` is the tokenizer's."""

    words_per_token: float
    salt: str = ""

    def body(self, request: FleetRequest, number: int) -> dict[str, object]:
        """The chat of a request."""
        documents = [
            {"text": words(f"{self.salt}{name}", round(tokens * self.words_per_token))}
            for name, tokens in request.documents
        ]
        question = words(f"question {number}", round(request.text_tokens * self.words_per_token))
        return {
            "model": MODEL,
            "messages": [{"role": "user", "content": question}],
            "documents": documents,
            "temperature": 0,
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            "stream": True,
        }


async def ask(client: httpx.AsyncClient, url: str, body: object) -> Timed:
    """Send one request and read its stream. Raises httpx's errors."""
    begin, first = time.perf_counter(), 0.0
    report: dict[str, object] = {}
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            report = event.get("looseleaf", report)
            delta = event["choices"][0]["delta"] if event.get("choices") else {}
            if not first and delta.get("content"):
                first = time.perf_counter() - begin
    total = time.perf_counter() - begin
    computed, reused = report["document_tokens_computed"], report["document_tokens_reused"]
    assert isinstance(computed, int) and isinstance(reused, int)
    return Timed(url, first or total, total, computed + reused, computed)


async def calibrate(proxy: str, server: str, texts: Texts, request: FleetRequest) -> Costs:
    """The costs of a server, from requests one at a time."""
    texts = replace(texts, salt="calibration ")
    async with httpx.AsyncClient(timeout=60) as client:

        async def median(url: str, first: int, field: str) -> float:
            values = []
            for number in range(first, first + _SAMPLES):
                documents = tuple((number, tokens) for _, tokens in request.documents[:1])
                body = texts.body(replace(request, documents=documents), number)
                values.append(float(getattr(await ask(client, url, body), field)))
            return float(np.median(values))

        # the first ones load code
        await median(server, -_SAMPLES, "total")
        tokens = await median(server, 1000, "tokens")
        computed = await median(server, 2000, "first_token")
        cached = await median(server, 2000, "first_token")
        total = await median(server, 2000, "total")
        await median(proxy, 3000, "total")
        behind = await median(proxy, 3000, "first_token")
    row = max(1e-4, (total - cached) / max(1, request.output_tokens - 1))
    prefill = max(1e-7, (computed - cached) / tokens)
    step = max(1e-4, cached - prefill * request.text_tokens)
    # a step with one row costs what decoding takes; the rest of a cached first token is outside
    inside = min(step, row)
    overhead = max(0.0, behind - cached) + step - inside
    return Costs(
        step=inside, prefill=prefill, row=1e-5, overhead=overhead, step_tokens=2048, cores=2
    )


async def replay(
    requests: Sequence[FleetRequest], urls: Iterator[str], texts: Texts
) -> list[Timed]:
    """All requests at their times of arrival, each at the next of ``urls``."""
    limits = httpx.Limits(max_connections=512)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        begin = time.perf_counter()

        async def one(number: int, request: FleetRequest) -> Timed:
            await asyncio.sleep(max(0.0, begin + request.arrival - time.perf_counter()))
            return await ask(client, next(urls), texts.body(request, number))

        return list(await asyncio.gather(*(one(n, r) for n, r in enumerate(requests))))


def behind(proxy: str) -> Iterator[str]:
    """The proxy, for ever."""
    return repeat(proxy)


def figures(policy: str, replicas: int, times: Sequence[Timed], loads: Sequence[int]) -> Row:
    """The figures of a real run, of which the first fifth fills the pools."""
    steady = [entry.first_token for entry in times[len(times) // 5 :]]
    tokens, computed = sum(t.tokens for t in times), sum(t.computed for t in times)
    return {
        "policy": f"{policy}, real",
        "replicas": replicas,
        "tier": "none",
        "requests": len(times),
        "hits": 1.0 - computed / max(1, tokens),
        "first_token_p50": float(np.median(steady)),
        "first_token_p99": float(np.quantile(steady, 0.99)),
        "load_over_mean": max(loads) * len(loads) / max(1, sum(loads)),
        "gb_moved": 0.0,
        "dollars_per_million": 0.0,
    }

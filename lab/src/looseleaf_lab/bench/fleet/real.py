"""The same requests at real servers, in a closed loop of clients or at their times of arrival."""

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from types import MappingProxyType

import aiohttp
import numpy as np

from looseleaf.errors import LooseleafError
from looseleaf_lab.bench.endpoint.workload import words
from looseleaf_lab.bench.fleet.requests import FleetRequest
from looseleaf_lab.bench.results import Row

_GIVE_UP_SECONDS = 600.0
_PAUSE_SECONDS = 0.2
_BUSY = (429, 503)


@dataclass(frozen=True)
class Timed:
    """One real request. Times are in seconds from its first attempt.

    ``queued``, ``engine_first`` and ``engine_total`` are the engine's own times of the answer.
    ``lost`` attempts had begun when their replica or the proxy ended, ``refused`` ones had not."""

    first_token: float
    total: float
    tokens: int
    computed: int
    text_tokens: int
    queued: float
    engine_first: float
    engine_total: float
    answer: str
    lost: int = 0
    refused: int = 0


@dataclass(frozen=True)
class Texts:
    """Real texts for the numbers of documents; ``words_per_token`` is the tokenizer's.

    With ``questions``, requests repeat that many questions, else each has its own."""

    model: str
    words_per_token: float
    questions: int | None = None
    _documents: dict[int, str] = field(default_factory=dict)

    def question(self, number: int) -> int:
        """The number of a request's question."""
        return number if self.questions is None else number % self.questions

    def body(self, request: FleetRequest, number: int) -> bytes:
        """The chat of a request, as JSON."""
        question = words(
            f"question {self.question(number)}", round(request.text_tokens * self.words_per_token)
        )
        content = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "documents": [{"text": self._document(*pair)} for pair in request.documents],
            "temperature": 0,
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        return json.dumps(content).encode()

    def _document(self, number: int, tokens: int) -> str:
        if number not in self._documents:
            self._documents[number] = words(number, round(tokens * self.words_per_token))
        return self._documents[number]


class _Lost(Exception):
    """The answer had begun, or the request was sent, when the connection or the replica ended."""


class _Refused(Exception):
    """The request was not accepted."""


async def ask(session: aiohttp.ClientSession, url: str, body: bytes) -> Timed:
    """Send a request until it is answered, and read its stream.

    Raises LooseleafError for errors that no second attempt mends."""
    begin, lost, refused = time.perf_counter(), 0, 0
    while time.perf_counter() < begin + _GIVE_UP_SECONDS:
        try:
            return await _attempt(session, url, body, begin, lost, refused)
        except _Lost:
            lost += 1
        except _Refused:
            refused += 1
        await asyncio.sleep(_PAUSE_SECONDS)
    raise LooseleafError(
        f"a request was lost {lost} times and refused {refused} times in {_GIVE_UP_SECONDS:g} s"
    )


async def _attempt(
    session: aiohttp.ClientSession, url: str, body: bytes, begin: float, lost: int, refused: int
) -> Timed:
    first, answer = 0.0, ""
    report: dict[str, object] = {}
    headers = {"Content-Type": "application/json"}
    try:
        async with session.post(
            f"{url}/v1/chat/completions", data=body, headers=headers
        ) as response:
            if response.status in _BUSY:
                raise _Refused
            if response.status != 200:
                text = await response.text()
                raise LooseleafError(f"status {response.status}: {text[:300]}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise _Lost
                report = event.get("looseleaf", report)
                delta = event["choices"][0]["delta"] if event.get("choices") else {}
                if content := delta.get("content"):
                    first = first or time.perf_counter() - begin
                    answer += content
    except aiohttp.ClientConnectorError as error:
        raise _Refused from error
    except (aiohttp.ClientError, ConnectionError, json.JSONDecodeError) as error:
        # a stream may end within a line
        raise _Lost from error
    if not report:
        raise _Lost
    return _timed(report, first, time.perf_counter() - begin, answer, lost, refused)


def _timed(
    report: dict[str, object], first: float, total: float, answer: str, lost: int, refused: int
) -> Timed:
    def number(name: str) -> int:
        value = report[name]
        assert isinstance(value, int)
        return value

    times = report["times"]
    assert isinstance(times, dict)
    computed, reused = number("document_tokens_computed"), number("document_tokens_reused")
    return Timed(
        first or total,
        total,
        computed + reused,
        computed,
        number("text_tokens") - number("text_tokens_cached"),
        times["queued"],
        times["first_token"],
        times["total"],
        answer,
        lost,
        refused,
    )


async def replay(
    requests: Iterable[tuple[int, FleetRequest]],
    urls: Iterator[str],
    texts: Texts,
    clients: int | None = None,
    interrupts: Mapping[int, Callable[[], None]] = MappingProxyType({}),
) -> list[Timed]:
    """The times of numbered requests by number, each at the next of ``urls``.

    ``clients`` send one request after another; None sends each at its time of arrival.
    ``interrupts`` are called in a thread after as many answers."""
    times: dict[int, Timed] = {}
    queue = iter(requests)
    running = []
    timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        begin = time.perf_counter()

        async def one(number: int, request: FleetRequest) -> None:
            times[number] = await ask(session, next(urls), texts.body(request, number))
            if len(times) in interrupts:
                act = interrupts[len(times)]
                running.append(asyncio.create_task(asyncio.to_thread(act)))

        async def at_arrival(number: int, request: FleetRequest) -> None:
            await asyncio.sleep(max(0.0, begin + request.arrival - time.perf_counter()))
            await one(number, request)

        async def client() -> None:
            for number, request in queue:
                await one(number, request)

        if clients is None:
            await asyncio.gather(*(at_arrival(n, r) for n, r in queue))
        else:
            await asyncio.gather(*(client() for _ in range(clients)))
        await asyncio.gather(*running)
    return [times[number] for number in sorted(times)]


def behind(proxy: str) -> Iterator[str]:
    """The proxy, for ever."""
    return repeat(proxy)


def in_turn(urls: Sequence[str]) -> Iterator[str]:
    """The servers in turn, for ever."""
    while True:
        yield from urls


def figures(
    policy: str, replicas: int, times: Sequence[Timed], loads: Sequence[int], wrong: int = 0
) -> Row:
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
        "lost": sum(t.lost for t in times),
        "refused": sum(t.refused for t in times),
        "wrong": wrong,
    }

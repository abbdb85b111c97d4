"""``bench serve``: many streams over few documents, from several tenants, some of which go away.

The server runs in a process of its own. Every answer that ends is held against the same question
asked alone, in fp32, where the two must be equal; pages and memory are looked at when all is
quiet again."""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from looseleaf.errors import LooseleafError
from looseleaf.llm.llm import LLM
from looseleaf.prompt.request import Document
from looseleaf.sampling_params import SamplingParams
from looseleaf_lab.bench.progress import SILENT, Progress
from looseleaf_lab.bench.results import Row
from looseleaf_lab.bench.server_process import ServerProcess


@dataclass(frozen=True)
class Load:
    """``streams`` callers ask one question after another for ``seconds``, from a list of
    ``questions`` different ones over ``documents`` texts; a share of ``leaving`` goes away in the
    middle of an answer."""

    streams: int = 200
    seconds: float = 300.0
    documents: int = 20
    tenants: int = 3
    questions: int = 100
    leaving: float = 0.1
    max_tokens: int = 64
    seed: int = 0


@dataclass(frozen=True)
class Question:
    """A request of the list: texts in their order, and what is asked of them."""

    texts: tuple[str, ...]
    text: str


@dataclass
class Tally:
    """What came back. Times in seconds; ``failures`` are sentences."""

    finished: int = 0
    left: int = 0
    tokens: int = 0
    elapsed: float = 0.0
    first_token: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def make_questions(load: Load, texts: Sequence[str], asked: Sequence[str]) -> list[Question]:
    """One to four of the texts, in any order, with a question each."""
    rng = random.Random(load.seed)
    return [
        Question(tuple(rng.sample(texts, rng.randint(1, min(4, len(texts))))), rng.choice(asked))
        for _ in range(load.questions)
    ]


def answers_alone(questions: Sequence[Question], load: Load) -> list[str]:
    """What the model says to each question when nothing else runs."""
    llm = LLM(dtype="float32")
    params = SamplingParams(temperature=0.0, max_tokens=load.max_tokens)
    answers = []
    for question in questions:
        content = [*(Document(text) for text in question.texts), question.text]
        (output,) = llm.chat([[{"role": "user", "content": content}]], params)
        answers.append(output.text)
    return answers


def measure(
    load: Load, texts: Sequence[str], asked: Sequence[str], progress: Progress = SILENT
) -> Row:
    """The figures of one run. Raises LooseleafError if an answer was wrong or failed, or a page was
    lost."""
    questions = make_questions(load, texts, asked)
    progress.stage(f"{len(questions)} questions, each alone")
    expected = answers_alone(questions, load)
    keys = [f"key-of-tenant-{n}" for n in range(load.tenants)]
    progress.stage("starting a server")
    with ServerProcess(keys, max_queue=load.streams) as server:
        progress.stage(f"{load.streams} streams for {load.seconds:g} s")
        tally, memory = asyncio.run(_drive(load, server, questions, expected))
        pages = server.settled_pages()
    problems = [*tally.failures[:3], *tally.wrong[:3]]
    if pages["lost"]:
        problems.append(f"{pages['lost']:.0f} pages are lost")
    if problems or not tally.finished:
        raise LooseleafError(
            f"{len(tally.wrong)} wrong answers, {len(tally.failures)} failures of "
            f"{tally.finished + len(tally.failures)} requests, so no speed is reported: "
            + "; ".join(problems)
        )
    first = statistics.quantiles(tally.first_token, n=100, method="inclusive")
    return {
        "model": "reference",
        "dtype": "float32",
        "streams": load.streams,
        "seconds": load.seconds,
        "documents": load.documents,
        "tenants": load.tenants,
        "finished": tally.finished,
        "left_midway": tally.left,
        "wrong": len(tally.wrong),
        "lost_pages": int(pages["lost"]),
        "first_token_p50_ms": 1e3 * first[49],
        "first_token_p99_ms": 1e3 * first[98],
        "tokens_per_s": tally.tokens / tally.elapsed,
        "memory_half_mib": memory[0] / 2**20,
        "memory_end_mib": memory[1] / 2**20,
    }


async def _drive(
    load: Load, server: ServerProcess, questions: Sequence[Question], expected: Sequence[str]
) -> tuple[Tally, tuple[int, int]]:
    import httpx

    tally = Tally()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=600, trust_env=False, limits=limits
    ) as client:
        start = time.perf_counter()
        end = start + load.seconds

        async def caller(number: int) -> None:
            rng = random.Random(f"{load.seed}/{number}")
            headers = {"Authorization": f"Bearer {server.keys[number % load.tenants]}"}
            while time.perf_counter() < end:
                chosen = rng.randrange(len(questions))
                leave = rng.randint(1, 6) if rng.random() < load.leaving else None
                body = _body(server.model, questions[chosen], load)
                try:
                    await _ask(client, headers, body, (leave, expected[chosen], tally))
                except (httpx.HTTPError, _Refused) as error:
                    tally.failures.append(f"{type(error).__name__}: {error}")

        tasks = [asyncio.create_task(caller(n)) for n in range(load.streams)]
        # caches and allocators have filled by then
        await asyncio.sleep(load.seconds / 2)
        half = server.memory()
        await asyncio.gather(*tasks)
        tally.elapsed = time.perf_counter() - start
    return tally, (half, server.memory())


class _Refused(LooseleafError):
    """The server did not answer with a whole stream."""


def _body(model: str, question: Question, load: Load) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": question.text}],
        "documents": [{"text": text} for text in question.texts],
        "temperature": 0,
        "max_tokens": load.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _ask(
    client: Any,
    headers: Mapping[str, str],
    body: Mapping[str, Any],
    told: tuple[int | None, str, Tally],
) -> None:
    """One stream; it is left after some chunks, or held against the answer that is expected."""
    leave, expected, tally = told
    start, text, chunks, done = time.perf_counter(), "", 0, False
    async with client.stream(
        "POST", "/v1/chat/completions", json=body, headers=headers
    ) as response:
        if response.status_code != 200:
            raise _Refused(f"{response.status_code} {(await response.aread())[:200]!r}")
        async for line in response.aiter_lines():
            if not line:
                continue
            if line == "data: [DONE]":
                done = True
                break
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise _Refused(str(event["error"]))
            piece = "".join(c["delta"].get("content") or "" for c in event["choices"])
            if event["usage"] is not None:
                tally.tokens += event["usage"]["completion_tokens"]
            if piece and not text:
                tally.first_token.append(time.perf_counter() - start)
            text += piece
            chunks += bool(piece)
            if leave is not None and chunks >= leave:
                tally.left += 1
                return
    if not done:
        raise _Refused("the stream ended before [DONE]")
    tally.finished += 1
    if text != expected:
        tally.wrong.append(f"{text!r} instead of {expected!r}")

"""``bench serve``: many streams over few documents, from several tenants, with disconnects.

The server runs in a process of its own. Every complete answer must equal the answer to the same
question alone, in fp32. After the load, pages and memory are checked for leaks."""

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
    """``streams`` clients send one question after another for ``seconds``.

    The questions are ``questions`` different ones over ``documents`` texts. A share ``leaving`` of
    the requests disconnects in the middle of an answer."""

    streams: int = 200
    seconds: float = 300.0
    documents: int = 20
    tenants: int = 3
    questions: int = 100
    leaving: float = 0.1
    max_tokens: int = 64
    seed: int = 0


@dataclass(frozen=True)
class LoadQuestion:
    """The texts of a request, in order, and its question."""

    texts: tuple[str, ...]
    text: str


@dataclass
class Tally:
    """Counts of a run; times in seconds, ``failures`` are sentences."""

    finished: int = 0
    disconnected: int = 0
    tokens: int = 0
    elapsed: float = 0.0
    first_token: list[float] = field(default_factory=list)
    wrong_answers: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def make_questions(
    load: Load, texts: Sequence[str], question_texts: Sequence[str]
) -> list[LoadQuestion]:
    """Questions over one to four of the texts, in random order."""
    rng = random.Random(load.seed)
    return [
        LoadQuestion(
            tuple(rng.sample(texts, rng.randint(1, min(4, len(texts))))), rng.choice(question_texts)
        )
        for _ in range(load.questions)
    ]


def answers_alone(questions: Sequence[LoadQuestion], load: Load) -> list[str]:
    """The model's answer to each question without other load."""
    llm = LLM(dtype="float32")
    params = SamplingParams(temperature=0.0, max_tokens=load.max_tokens)
    answers = []
    for question in questions:
        content = [*(Document(text) for text in question.texts), question.text]
        (output,) = llm.chat([[{"role": "user", "content": content}]], params)
        answers.append(output.text)
    return answers


def measure(
    load: Load, texts: Sequence[str], question_texts: Sequence[str], progress: Progress = SILENT
) -> Row:
    """The figures of one run. Raises LooseleafError for a wrong answer, a failure or a lost
    page."""
    questions = make_questions(load, texts, question_texts)
    progress.stage(f"{len(questions)} questions, each alone")
    expected = answers_alone(questions, load)
    keys = [f"key-of-tenant-{n}" for n in range(load.tenants)]
    progress.stage("starting a server")
    with ServerProcess(keys, max_queue=load.streams) as server:
        progress.stage(f"{load.streams} streams for {load.seconds:g} s")
        tally, memory = asyncio.run(_drive(load, server, questions, expected))
        pages = server.settled_pages()
    problems = [*tally.failures[:3], *tally.wrong_answers[:3]]
    if pages["lost"]:
        problems.append(f"{pages['lost']:.0f} pages are lost")
    if problems or not tally.finished:
        raise LooseleafError(
            f"{len(tally.wrong_answers)} wrong answers, {len(tally.failures)} failures of "
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
        "left_midway": tally.disconnected,
        "wrong": len(tally.wrong_answers),
        "lost_pages": int(pages["lost"]),
        "first_token_p50_ms": 1e3 * first[49],
        "first_token_p99_ms": 1e3 * first[98],
        "tokens_per_s": tally.tokens / tally.elapsed,
        "memory_half_mib": memory[0] / 2**20,
        "memory_end_mib": memory[1] / 2**20,
    }


async def _drive(
    load: Load, server: ServerProcess, questions: Sequence[LoadQuestion], expected: Sequence[str]
) -> tuple[Tally, tuple[int, int]]:
    import httpx

    tally = Tally()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=600, trust_env=False, limits=limits
    ) as client:
        start = time.perf_counter()
        deadline = start + load.seconds

        async def caller(number: int) -> None:
            rng = random.Random(f"{load.seed}/{number}")
            headers = {"Authorization": f"Bearer {server.keys[number % load.tenants]}"}
            while time.perf_counter() < deadline:
                number_of_question = rng.randrange(len(questions))
                chunks_to_read = rng.randint(1, 6) if rng.random() < load.leaving else None
                body = _body(server.model, questions[number_of_question], load)
                try:
                    await _stream(
                        client, headers, body, chunks_to_read, expected[number_of_question], tally
                    )
                except (httpx.HTTPError, _StreamError) as error:
                    tally.failures.append(f"{type(error).__name__}: {error}")

        tasks = [asyncio.create_task(caller(n)) for n in range(load.streams)]
        # after half the time, caches and allocators are full
        await asyncio.sleep(load.seconds / 2)
        half_memory = server.memory()
        await asyncio.gather(*tasks)
        tally.elapsed = time.perf_counter() - start
    return tally, (half_memory, server.memory())


class _StreamError(LooseleafError):
    """The server's response is not a complete stream."""


def _body(model: str, question: LoadQuestion, load: Load) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": question.text}],
        "documents": [{"text": text} for text in question.texts],
        "temperature": 0,
        "max_tokens": load.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _stream(
    client: Any,
    headers: Mapping[str, str],
    body: Mapping[str, Any],
    chunks_to_read: int | None,
    expected: str,
    tally: Tally,
) -> None:
    """One stream, compared with ``expected``, or closed after ``chunks_to_read`` chunks."""
    start, text, chunks, complete = time.perf_counter(), "", 0, False
    async with client.stream(
        "POST", "/v1/chat/completions", json=body, headers=headers
    ) as response:
        if response.status_code != 200:
            raise _StreamError(f"{response.status_code} {(await response.aread())[:200]!r}")
        async for line in response.aiter_lines():
            if not line:
                continue
            if line == "data: [DONE]":
                complete = True
                break
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise _StreamError(str(event["error"]))
            piece = "".join(c["delta"].get("content") or "" for c in event["choices"])
            if event["usage"] is not None:
                tally.tokens += event["usage"]["completion_tokens"]
            if piece and not text:
                tally.first_token.append(time.perf_counter() - start)
            text += piece
            chunks += bool(piece)
            if chunks_to_read is not None and chunks >= chunks_to_read:
                tally.disconnected += 1
                return
    if not complete:
        raise _StreamError("the stream ended before [DONE]")
    tally.finished += 1
    if text != expected:
        tally.wrong_answers.append(f"{text!r} instead of {expected!r}")

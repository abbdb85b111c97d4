"""Closed and open loops over an endpoint, split over client processes."""

import asyncio
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from looseleaf_lab.bench.endpoint.client import Client
from looseleaf_lab.bench.endpoint.figures import Answer
from looseleaf_lab.bench.endpoint.workload import Endpoint, Prompt

BUSY = 0.8
"""CPU share of a client process from which its own speed can bound the figures."""


@dataclass(frozen=True)
class Share:
    """The requests of one client process. ``streams`` of 0 is an open loop."""

    endpoint: Endpoint
    prompts: tuple[Prompt, ...]
    streams: int
    timeout: float


@dataclass(frozen=True)
class Outcome:
    """Answers of a load, and the highest CPU share of its client processes (0 to 1)."""

    answers: tuple[Answer, ...]
    cpu_share: float


def split(
    endpoint: Endpoint, prompts: Sequence[Prompt], streams: int, clients: int, timeout: float
) -> list[Share]:
    """Requests and streams in turn over at most ``clients`` processes, each with a stream."""
    number = min(clients, len(prompts), streams or clients)
    return [
        Share(
            endpoint,
            tuple(prompts[n::number]),
            streams // number + (n < streams % number) if streams else 0,
            timeout,
        )
        for n in range(number)
    ]


def run_load(shares: Sequence[Share]) -> Outcome:
    """Runs all shares, each in a process; they start together when all processes are ready."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(shares))
    with ProcessPoolExecutor(len(shares), context, barrier.wait) as pool:
        outcomes = list(pool.map(run_share, shares))
    answers = tuple(answer for outcome in outcomes for answer in outcome.answers)
    return Outcome(answers, max(outcome.cpu_share for outcome in outcomes))


def run_share(share: Share) -> Outcome:
    """Runs one share in this process. Times are those of the system's monotonic clock."""
    cpu, start = time.process_time(), time.monotonic()
    answers = asyncio.run(_answers(share))
    seconds = time.monotonic() - start
    return Outcome(tuple(answers), (time.process_time() - cpu) / max(seconds, 1e-9))


async def closed_loop(
    prompts: Sequence[Prompt],
    streams: int,
    send: Callable[[Prompt], Awaitable[Answer]],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> list[Answer]:
    """Each of ``streams`` sends the next prompt when its last answer is complete.

    Prompts with a time enter beside the streams at that time after the start."""
    waiting, answers = iter([p for p in prompts if not p.at]), list[Answer]()

    async def stream() -> None:
        for prompt in waiting:
            answers.append(await send(prompt))

    async def enter(prompt: Prompt) -> None:
        await sleep(prompt.at)
        answers.append(replace(await send(prompt), entered=True))

    entering = (enter(prompt) for prompt in prompts if prompt.at)
    await asyncio.gather(*(stream() for _ in range(streams)), *entering)
    return answers


async def open_loop(
    prompts: Sequence[Prompt],
    send: Callable[[Prompt, float], Awaitable[Answer]],
    clock: Callable[[], float],
    sleep: Callable[[float], Awaitable[None]],
) -> list[Answer]:
    """Sends each prompt at its time after the start, without a wait for earlier answers.

    ``send`` gets that time, so an answer's wait includes the client's delay."""
    start, tasks = clock(), []
    for prompt in sorted(prompts, key=lambda prompt: prompt.at):
        due = start + prompt.at
        if (wait := due - clock()) > 0:
            await sleep(wait)
        tasks.append(asyncio.ensure_future(send(prompt, due)))
    return list(await asyncio.gather(*tasks))


async def _answers(share: Share) -> list[Answer]:
    client = Client(share.endpoint, time.monotonic, share.timeout)
    try:
        if share.streams:
            return await closed_loop(share.prompts, share.streams, client.stream)
        return await open_loop(share.prompts, client.stream, time.monotonic, asyncio.sleep)
    finally:
        client.close()

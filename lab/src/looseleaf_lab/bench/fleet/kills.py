"""A run in which each server, and twice the proxy, end by SIGKILL and start again."""

import asyncio
from collections.abc import Iterator, Sequence
from threading import Event

from looseleaf_lab.bench.fleet.real import Texts, Timed, behind, in_turn, replay
from looseleaf_lab.bench.fleet.requests import FleetRequest
from looseleaf_lab.bench.fleet.servers import RealFleet, wait_until_ready

QUESTIONS = 4
"""Questions about a document, few so that a quiet server can answer all of them again."""

_LOADED = 24
"""Answers before the first kill, so that all servers have requests in flight."""


def with_kills(
    requests: Sequence[FleetRequest], fleet: RealFleet, texts: Texts, clients: int
) -> tuple[list[Timed], int]:
    """The times while each replica and twice the proxy are killed, and the number of wrong answers.

    The requests repeat until the last victim is back. An answer is wrong if a quiet server of the
    same fleet gives another one."""
    proxy, servers, all_back = fleet.proxy, fleet.servers, Event()
    assert proxy is not None
    victims = [servers[0], servers[1], proxy, servers[2], proxy]
    sent: dict[int, FleetRequest] = {}

    def traffic() -> Iterator[tuple[int, FleetRequest]]:
        while len(sent) < len(requests) or not all_back.is_set():
            number = len(sent)
            sent[number] = requests[number % len(requests)]
            yield number, sent[number]

    def restart() -> None:
        try:
            for victim in victims:
                victim.restart()
                wait_until_ready(fleet.url, len(servers))
        finally:
            all_back.set()

    interrupts = {min(_LOADED, len(requests)): restart}
    times = asyncio.run(replay(traffic(), behind(fleet.url), texts, clients, interrupts))
    keys = [(request.documents, texts.question(number)) for number, request in sent.items()]
    distinct = {key: number for number, key in enumerate(keys)}
    again = {number: sent[number] for number in sorted(distinct.values())}
    quiet = asyncio.run(replay(again.items(), in_turn([servers[0].url]), texts, 1))
    answers = {keys[n]: entry.answer for n, entry in zip(again, quiet, strict=True)}
    wrong = sum(entry.answer != answers[key] for entry, key in zip(times, keys, strict=True))
    return times, wrong

"""A run in which each server, and twice the proxy, end by SIGKILL and start again."""

import asyncio
from collections.abc import Sequence
from functools import partial
from threading import Lock

from looseleaf_lab.bench.fleet.real import Texts, Timed, behind, in_turn, replay
from looseleaf_lab.bench.fleet.requests import FleetRequest
from looseleaf_lab.bench.fleet.servers import Command, RealFleet, wait_until_ready

QUESTIONS = 4
"""Questions about a document, few so that a quiet server can answer all of them again."""


def with_kills(
    requests: Sequence[FleetRequest], fleet: RealFleet, texts: Texts, clients: int | None
) -> tuple[list[Timed], int]:
    """The times while each replica and twice the proxy are killed, and the number of wrong answers.

    An answer is wrong if a quiet server of the same fleet gives another one."""
    proxy, servers = fleet.proxy, fleet.servers
    assert proxy is not None

    victims = [servers[0], servers[1], proxy, servers[2], proxy]
    part, turns = max(1, len(requests) // (len(victims) + 1)), Lock()

    def restart(victim: Command) -> None:
        # a slow start must not meet the next kill
        with turns:
            victim.restart()
            wait_until_ready(fleet.url, len(servers))

    interrupts = {part * place: partial(restart, victim) for place, victim in enumerate(victims, 1)}
    numbered = dict(enumerate(requests))
    times = asyncio.run(replay(numbered, behind(fleet.url), texts, clients, interrupts))
    wait_until_ready(fleet.url, len(servers))
    keys = [(r.documents, texts.question(n)) for n, r in enumerate(requests)]
    distinct = {key: number for number, key in enumerate(keys)}
    again = {number: requests[number] for number in distinct.values()}
    quiet = asyncio.run(replay(again, in_turn([servers[0].url]), texts, 1))
    answers = dict(zip(distinct, (t.answer for t in quiet), strict=True))
    wrong = sum(entry.answer != answers[key] for entry, key in zip(times, keys, strict=True))
    return times, wrong

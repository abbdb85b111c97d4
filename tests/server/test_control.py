"""Messages and sockets over one control socket, in order, also while it is full."""

import asyncio
import contextlib
import socket
from typing import Any

import pytest

from looseleaf.llm.remote import link
from looseleaf.llm.remote.link import frame_of
from looseleaf.server.processes.control import (
    Connect,
    Control,
    Restored,
    Scrape,
    Stored,
    ToProcess,
)

# longer than a socket's buffer
LONG = Stored(1, [b"x" * (1 << 22)])


def fill(full: socket.socket) -> int:
    """Send whole messages until a socket is full; returns their number."""
    full.setblocking(False)
    frame, number = frame_of(Scrape(0)), 0
    with contextlib.suppress(BlockingIOError):
        while full.send(frame) == len(frame):
            number += 1
    return number


@pytest.mark.parametrize("begin", ["empty", "full", "inside a message"])
def test_sockets_and_messages_arrive_in_order(begin: str) -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        num_before = fill(ours) if begin == "full" else 0
        sender = Control(ours, ToProcess, lambda _: None, lambda: None)
        expected: list[Any] = [Scrape(0)] * num_before
        if begin == "inside a message":
            sender.send(LONG)
            expected.append(LONG)
        kept = []
        for number in range(3):
            mine, passed = socket.socketpair()
            kept.append(mine)
            facts = {"number": number, "text": "y" * (1 << 20) * number}
            messages = [Connect(facts), Scrape(number)]
            sender.send_socket(messages[0], passed)
            sender.send(messages[1])
            expected += messages
        sender.send(Restored())
        expected.append(Restored())

        received: list[Any] = []
        arrival = asyncio.get_running_loop().create_future()

        def take(message: Any) -> None:
            received.append(message)
            if isinstance(message, Connect):
                assert message.facts is not None
                with receiver.sockets.popleft() as end:
                    end.send(b"%d" % message.facts["number"])
            elif isinstance(message, Restored):
                arrival.set_result(None)

        def end() -> None:
            if not arrival.done():
                arrival.set_exception(EOFError())

        receiver = Control(theirs, ToProcess, take, end)
        async with asyncio.timeout(60):
            await arrival
        assert received == expected
        for number, mine in enumerate(kept):
            with mine:
                mine.settimeout(60)
                # the sender's copy is closed too
                assert (mine.recv(9), mine.recv(9)) == (b"%d" % number, b"")
        sender.close()
        receiver.close()

    asyncio.run(scenario())


def test_sockets_that_were_not_sent_are_closed() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        sender = Control(ours, ToProcess, lambda _: None, lambda: None)
        sender.send(LONG)
        kept = []
        for is_open in (True, False):
            mine, passed = socket.socketpair()
            kept.append(mine)
            if not is_open:
                sender.close()
            sender.send_socket(Connect(), passed)
        theirs.close()
        for mine in kept:
            with mine:
                assert mine.recv(1) == b""

    asyncio.run(scenario())


def test_a_peer_that_reads_keeps_its_link_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MAX_BACKLOG", 1 << 20)

    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        sender = Control(ours, ToProcess, lambda _: None, lambda: None)
        # answers in one pass of the event loop, as those of a parent
        for number in range(4):
            sender.send(Stored(number, LONG.contents))
        received = asyncio.Queue[Any]()
        receiver = Control(theirs, ToProcess, received.put_nowait, lambda: None)
        async with asyncio.timeout(60):
            assert [(await received.get()).number for _ in range(4)] == [0, 1, 2, 3]
        assert sender.is_open
        sender.close()
        receiver.close()

    asyncio.run(scenario())


def test_a_peer_that_stops_reading_loses_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MAX_BACKLOG", 1 << 23)

    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        ended = asyncio.Event()
        sender = Control(ours, ToProcess, lambda _: None, ended.set)
        with theirs:
            sender.send(LONG)
            monkeypatch.setattr(link, "STALL_SECONDS", -1.0)
            # below the limit
            sender.send(LONG)
            # above it, but the peer has read since this process last tried
            assert theirs.recv(1 << 22)
            sender.send(LONG)
            # a scheduled close runs before this task continues
            await asyncio.sleep(0)
            assert sender.is_open and not ended.is_set()
            fill(ours)
            sender.send(LONG)
            async with asyncio.timeout(60):
                await ended.wait()
        assert not sender.is_open

    asyncio.run(scenario())


@pytest.mark.parametrize("end", ["read", "closed"])
def test_a_link_is_drained_when_its_peer_has_read_or_ended(end: str) -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        sender = Control(ours, ToProcess, lambda _: None, lambda: None)
        async with asyncio.timeout(60):
            await sender.drained()
            sender.send(LONG)
            waiting = asyncio.create_task(sender.drained())
            await asyncio.sleep(0)
            assert not waiting.done()
            if end == "read":
                receiver = Control(theirs, ToProcess, lambda _: None, lambda: None)
                await waiting
                assert sender.is_open
                receiver.close()
            theirs.close()
            await waiting
        sender.close()

    asyncio.run(scenario())

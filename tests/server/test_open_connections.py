"""Connections that nobody uses keep nobody out, however few descriptors there are."""

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from looseleaf.server.open_connections import (
    OpenConnections,
    connection_capacity,
    raise_descriptor_limit,
)
from tests.server.live import Live, chat_body, live_server
from tests.server.test_gate import connected, request_bytes, wait_until
from tests.server.test_stalled import HEAD

MOST = 8


@pytest.fixture(scope="module")
def crowded() -> Iterator[Live]:
    with live_server(config={"max_connections": MOST}) as live:
        yield live


class Caller:
    """A connection that notes whether it was told to give way."""

    gave_way = False

    def close_idle(self) -> None:
        self.gave_way = True


def test_who_has_been_idle_longest_gives_way_and_who_is_answered_never() -> None:
    told: list[None] = []
    places, callers = OpenConnections(3, lambda: told.append(None)), [Caller() for _ in range(6)]
    for caller in callers[:3]:
        places.enter(caller)
    places.busy(callers[0])
    places.busy(callers[1])
    places.idle(callers[0])
    places.enter(callers[3])
    assert [caller.gave_way for caller in callers[:4]] == [False, False, True, False]
    places.leave(callers[2])
    places.busy(callers[0])
    places.busy(callers[3])
    # all others are being answered
    places.enter(callers[4])
    assert callers[4].gave_way
    places.leave(callers[4])
    places.leave(callers[0])
    places.enter(callers[5])
    assert not callers[5].gave_way
    assert len(told) == 2


@pytest.mark.parametrize("sent", [b"", HEAD[:9], HEAD + b"\r\n"], ids=["nothing", "a word", "all"])
def test_more_idle_connections_than_are_taken_keep_no_request_out(
    crowded: Live, sent: bytes
) -> None:
    before = crowded.service.metrics.refused_connections._value.get()
    with ExitStack() as stack:
        stream = stack.enter_context(connected(crowded))
        body = chat_body(stream=True, max_tokens=400, ignore_eos=True)
        stream.sendall(request_bytes(crowded, body))
        answer = stream.recv(4096)
        for _ in range(3 * MOST):
            stack.enter_context(connected(crowded)).sendall(sent)
            # each is known to the server before the next comes
            with closing(socket.create_connection(stream.getpeername(), timeout=60)) as asking:
                asking.sendall(HEAD + b"Connection: close\r\n\r\n")
                assert asking.recv(4096).startswith(b"HTTP/1.1 200")
        while b"data: [DONE]" not in answer:
            piece = stream.recv(65536)
            assert piece, "an answer under way is not cut"
            answer = answer[-20:] + piece
        given_way = crowded.service.metrics.refused_connections._value.get() - before
        assert given_way >= 2 * MOST
        wait_until(lambda: len(crowded.server.server_state.connections) <= MOST)


def test_who_asks_for_another_protocol_takes_no_place_for_ever(crowded: Live) -> None:
    key = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: bG9vc2VsZWFmbG9vc2VsZQ==\r\n"
    for _ in range(2 * MOST):
        with connected(crowded) as caller:
            caller.sendall(HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\n" + key + b"\r\n")
            assert caller.recv(4096).startswith(b"HTTP/1.1 ")
    wait_until(lambda: crowded.server.connections.num <= 2)


@contextmanager
def limited(soft: int) -> Iterator[int]:
    """The hard limit of descriptors, while the soft one is so."""
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        yield hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


@pytest.mark.parametrize("descriptors", [256, 1024, 4096])
def test_connections_and_those_that_give_way_leave_descriptors_for_files(descriptors: int) -> None:
    with limited(descriptors):
        most, backlog = connection_capacity(100_000)
        assert most > descriptors // 2
        assert most + backlog <= descriptors - 64
        assert connection_capacity(10)[0] == 10


def test_a_server_gives_itself_the_descriptors_that_it_may_have() -> None:
    with limited(256) as hard:
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard


def test_where_the_system_refuses_what_it_says_is_allowed_a_server_takes_less(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """macOS says that there is no hard limit, and gives 10,240."""
    given = list[int]()

    def refuse(kind: int, limits: tuple[int, int]) -> None:
        if limits[0] > 10_240 or limits[0] < 0:
            raise ValueError("current limit exceeds maximum limit")
        given.append(limits[0])

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 2**63 - 1))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    raise_descriptor_limit()
    assert given == [10_240]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (20_000, 2**63 - 1))
    raise_descriptor_limit()
    assert given == [10_240]
    assert "stays at 20000: current limit exceeds" in caplog.text

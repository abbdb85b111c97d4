"""A connection ends when its caller stands still, and not while anything moves."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from looseleaf.server import gate, stalled
from tests.server.live import Live, chat_body, live_server
from tests.server.test_gate import connected, request_bytes, wait_until

LOOK = 0.1
HEAD = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@contextmanager
def looking(every: float) -> Iterator[Live]:
    """A server that looks so often, and keeps little for those who do not read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stalled, "CHECK_SECONDS", every)
        patch.setattr(gate, "STALL_SECONDS", 2 * every)
        with live_server() as live:
            live.server.config.timeout_keep_alive = 1
            listener = live.server.servers[0].sockets[0]
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            yield live


@pytest.fixture(scope="module")
def impatient() -> Iterator[Live]:
    with looking(LOOK) as live:
        yield live


def small(live: Live) -> "closing[socket.socket]":
    """A connection whose caller takes little at a time."""
    caller = socket.socket()
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    caller.settimeout(60)
    caller.connect(("127.0.0.1", live.server.bound_port))
    return closing(caller)


def is_open(live: Live, caller: socket.socket) -> bool:
    """Whether the server still has that caller's connection; asking lets it go on."""
    assert live.client.get("/health").is_success
    (_, port) = caller.getsockname()
    return any(one.client[1] == port for one in list(live.server.server_state.connections))


def large(**fields: Any) -> dict[str, Any]:
    """What is answered by much more than sockets keep."""
    long = {"max_tokens": 120, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    return chat_body(**long, **fields)


@pytest.mark.parametrize("stream", [False, True])
def test_who_does_not_read_an_answer_is_hung_up_on(impatient: Live, stream: bool) -> None:
    with small(impatient) as caller:
        caller.sendall(request_bytes(impatient, large(stream=stream)))
        wait_until(lambda: is_open(impatient, caller))
        wait_until(lambda: not is_open(impatient, caller))
    impatient.wait_until_idle()


@pytest.mark.parametrize("sent", [b"", HEAD[:9], HEAD], ids=["nothing", "a word", "half"])
def test_who_sends_no_head_is_hung_up_on(impatient: Live, sent: bytes) -> None:
    with connected(impatient) as caller:
        caller.sendall(sent)
        assert caller.recv(1) == b"", "the server ends it"


def test_who_begins_a_second_request_and_stops_is_hung_up_on(impatient: Live) -> None:
    with connected(impatient) as caller:
        caller.sendall(HEAD + b"\r\n")
        assert caller.recv(4096).startswith(b"HTTP/1.1 200")
        caller.sendall(HEAD)
        while caller.recv(4096):
            pass


def test_who_reads_slowly_reads_everything() -> None:
    # a busy machine may keep the reader waiting for longer than it means to
    look = 10 * LOOK
    with looking(look) as live, small(live) as caller:
        caller.sendall(request_bytes(live, large()))
        start, answer = time.monotonic(), b""
        while piece := caller.recv(4096):
            answer += piece
            read = len(answer) // 4096
            # requests of another one keep this one from reading for a while
            while time.monotonic() - start < read * look / 10:
                live.chat(max_tokens=1)
        assert time.monotonic() - start > 3 * look, "it outlasts some looks"
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert json.loads(body)["usage"]["completion_tokens"] == 120


def test_an_answer_may_take_longer_than_looks(impatient: Live) -> None:
    start = time.monotonic()
    answer = impatient.chat(max_tokens=500, ignore_eos=True)
    assert time.monotonic() - start > 4 * LOOK
    assert answer.json()["usage"]["completion_tokens"] == 500

"""Callers that hang up, that send a little at a time, and that stop reading."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import closing
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from looseleaf.server import gate
from looseleaf.server.connection import EventStream
from looseleaf.server.errors import busy
from looseleaf.server.names import REFERENCE_NAME
from tests.server.live import Live, chat_body, live_server

PATH = "/v1/chat/completions"


def request_bytes(live: Live, body: dict[str, Any]) -> bytes:
    """A POST as it goes over the wire."""
    content = json.dumps(body).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1:{live.server.bound_port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def said_behind(live: Live, head: str, body: bytes) -> bytes:
    """What a caller reads who looks for an answer when all is sent, as OpenAI's clients do."""
    with connected(live) as caller:
        caller.sendall(f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\n{head}\r\n".encode())
        caller.sendall(body)
        received = b""
        while part := caller.recv(65536):
            received += part
        return received


def connected(live: Live) -> "closing[socket.socket]":
    return closing(socket.create_connection(("127.0.0.1", live.server.bound_port), timeout=60))


def wait_until(told: Callable[[], bool]) -> None:
    """Ask until it is so; every question is a request, which lets the server go on."""
    end = time.monotonic() + 30
    while not told():
        assert time.monotonic() < end, "it never came to that"


def responses(live: Live, status: int) -> float:
    """How many responses on ``PATH`` are counted with that status."""
    start = f'looseleaf_http_responses_total{{route="{PATH}",status="{status}"}} '
    lines = live.client.get("/metrics").text.splitlines()
    return sum(float(line.removeprefix(start)) for line in lines if line.startswith(start))


@pytest.fixture
def counts(live: Live) -> Callable[[], dict[int, float]]:
    """How many responses were counted since, by their status."""
    live.wait_until_idle()
    statuses = (200, 400, 499, 500)
    before = {status: responses(live, status) for status in statuses}

    def grown() -> dict[int, float]:
        now = {status: responses(live, status) - before[status] for status in statuses}
        return {status: number for status, number in now.items() if number}

    return grown


@pytest.mark.parametrize("stream", [False, True])
def test_who_hangs_up_before_the_first_byte_is_counted_as_gone(
    live: Live, counts: Callable[[], dict[int, float]], stream: bool
) -> None:
    # of its own in each case: what has been computed gives a first byte at once
    text = "".join(f"The archive is in wing {n}, {stream}. " for n in range(150))
    body = chat_body(documents=[{"text": text}], max_tokens=500, ignore_eos=True, stream=stream)
    with connected(live) as caller:
        caller.sendall(request_bytes(live, body))
        wait_until(
            lambda: live.client.get("/health").is_success and live.service.queue.reserved > 0
        )
    wait_until(lambda: bool(counts()))
    assert counts() == {499: 1}


def test_who_hangs_up_within_the_body_is_counted_as_gone(
    live: Live, counts: Callable[[], dict[int, float]]
) -> None:
    with connected(live) as caller:
        caller.sendall(request_bytes(live, chat_body())[:-20])
        wait_until(lambda: live.service.under_way > 0)
    wait_until(lambda: bool(counts()))
    assert counts() == {499: 1}


def test_who_hangs_up_in_the_middle_of_an_answer_had_200(
    live: Live, counts: Callable[[], dict[int, float]]
) -> None:
    with connected(live) as caller:
        body = chat_body(max_tokens=3000, ignore_eos=True, stream=True)
        caller.sendall(request_bytes(live, body))
        assert caller.recv(1)
    wait_until(lambda: bool(counts()))
    assert counts() == {200: 1}


def passed(live: Live, app: Any, receive: Receive, send: Send) -> None:
    """One POST through the gate of a live server, to an application of the test's own."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope: Scope = {"type": "http", "method": "POST", "path": PATH, "headers": headers}
    asyncio.run(
        asyncio.wait_for(gate.Gate(app, live.service)({**scope, "route": None}, receive, send), 30)
    )


def test_a_body_has_to_arrive_as_a_whole_in_its_time(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "BODY_SECONDS", 0.2)
    told: list[Message] = []

    async def drop(message: Message) -> None:
        told.append(message)

    async def drip() -> Message:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"", "more_body": True}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass

    passed(live, app, drip, drop)
    assert told[0]["status"] == 408
    assert json.loads(told[1]["body"])["error"]["code"] == "slow_body"


@pytest.mark.parametrize("read", [0, 1, 3])
def test_who_stops_reading_gives_the_place_in_the_queue_back(
    live: Live, monkeypatch: pytest.MonkeyPatch, read: int
) -> None:
    monkeypatch.setattr(gate, "STALL_SECONDS", 0.05)
    closed = []

    async def answers() -> AsyncGenerator[dict[str, Any], None]:
        try:
            with live.service.queue.reserve(2):
                while True:
                    yield [{"text": "more"}]
        finally:
            closed.append(live.service.queue.reserved)

    async def stay() -> Message:
        return await asyncio.get_running_loop().create_future()

    messages = iter(range(read))

    async def read_little(message: Message) -> None:
        if next(messages, None) is None:
            await asyncio.get_running_loop().create_future()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await EventStream(answers())(scope, receive, send)

    live.wait_until_idle()
    passed(live, app, stay, read_little)
    assert closed == [0]


def test_a_reader_that_is_stuck_does_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "STALL_SECONDS", 0.5)
    with live_server(config={"max_queue": 1}, engine={"max_num_seqs": 2}) as live:
        body = {
            "model": REFERENCE_NAME,
            "messages": [{"role": "user", "content": "Who signs?"}],
            **{"stream": True, "max_tokens": 3000, "ignore_eos": True, "temperature": 1, "n": 3},
            **{"logprobs": True, "top_logprobs": 20},
        }
        # what the kernel keeps for a reader has to fill before anybody notices
        listener = live.server.servers[0].sockets[0]
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with closing(socket.socket()) as caller:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            caller.connect(("127.0.0.1", live.server.bound_port))
            caller.sendall(request_bytes(live, body))
            wait_until(
                lambda: live.client.get("/health").is_success and live.service.queue.reserved > 0
            )
            wait_until(lambda: live.chat(max_tokens=1).status_code == 200)
        live.wait_until_idle()


def test_a_time_to_retry_is_never_too_short() -> None:
    assert busy("full", 1.2).headers == {"Retry-After": "2"}
    assert busy("full", 0.0).headers == {"Retry-After": "1"}


def test_who_sends_too_much_and_looks_then_is_told_so(live: Live) -> None:
    body = b" " * (2**24)
    head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    assert b" 413 " in said_behind(live, head, body).partition(b"\r\n")[0]


def test_who_has_no_key_is_told_so_behind_a_large_body(tenants: Live) -> None:
    body = b" " * (tenants.service.max_body - 1)
    head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    assert b" 401 " in said_behind(tenants, head, body).partition(b"\r\n")[0]


def test_nobody_is_read_for_ever_who_was_refused(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "LINGER_SECONDS", 0.05)
    monkeypatch.setattr(gate, "LINGER_BYTES", 2**20)
    # one sends nothing of what it said that it would, another more than anybody reads
    silent = "Content-Type: application/json\r\nContent-Length: 999999999\r\n"
    assert b" 413 " in said_behind(live, silent, b"").partition(b"\r\n")[0]
    with pytest.raises(OSError):
        said_behind(live, silent, b" " * (2**26))


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("length", [0, 5, 10**15])
def test_a_request_that_states_its_length_twice_is_refused_and_its_connection_ends(
    live: Live, order: int, length: int
) -> None:
    stated = ["Transfer-Encoding: chunked\r\n", f"Content-Length: {length}\r\n"][::order]
    inner = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    said = said_behind(live, "".join(stated), b"0\r\n\r\n" + inner)
    assert said.startswith(b"HTTP/1.1 400 ") and said.count(b"HTTP/1.1") == 1
    assert b'"ambiguous_length"' in said and b"connection: close" in said

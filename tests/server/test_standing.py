"""A server whose engine stands still says so to probes and scrapes, and to who asks."""

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from looseleaf.engine.documents.entry import DocumentInfo
from looseleaf.engine.engine import Engine
from tests.server.live import Live, live_server
from tests.server.test_gate import wait_until

STALL = 0.05


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Live, Callable[[], None]]]:
    """A server in the middle of a step, and what lets that step end."""
    reached, opened, step = threading.Event(), threading.Event(), Engine.step

    def slow(engine: Engine) -> Any:
        reached.set()
        assert opened.wait(60)
        return step(engine)

    with live_server(config={"stall_seconds": STALL}) as live:
        assert live.client.get("/health").json() == {"status": "ok"}
        monkeypatch.setattr(Engine, "step", slow)
        ask = live.service.llm.hold_system_prompt("Answer in one word.")
        asked = asyncio.run_coroutine_threadsafe(ask, live.loop)
        assert reached.wait(60)
        try:
            yield live, opened.set
        finally:
            opened.set()
            asked.result(60)


def gauge(live: Live, name: str) -> float:
    """One metric without labels."""
    text = live.client.get("/metrics").text
    return float(re.findall(rf"^looseleaf_{name} (\S+)$", text, re.MULTILINE)[0])


def test_probes_fail_and_a_gauge_falls_while_a_step_stands_still_and_rise_after_it(
    stuck: tuple[Live, Callable[[], None]],
) -> None:
    live, let_go = stuck
    wait_until(lambda: live.client.get("/health").status_code == 503)
    for path in ("/health", "/ready"):
        told = live.client.get(path)
        assert (told.status_code, told.json()) == (503, {"status": "stuck"})
    assert gauge(live, "engine_up") == 0
    assert gauge(live, "engine_busy_seconds") > STALL
    refused = live.chat()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "stuck"
    let_go()
    wait_until(lambda: live.client.get("/health").is_success)
    assert live.client.get("/ready").json() == {"status": "ready"}
    assert gauge(live, "engine_up") == 1
    assert live.chat(max_tokens=1).is_success


def test_a_question_about_documents_does_not_wait_longer_than_a_request_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with live_server(config={"deadline": 0.05}) as live:
        for name in ("documents", "document", "pin", "unpin", "delete"):
            monkeypatch.setattr(live.service.llm, name, never)
        paths = [("GET", ""), ("GET", "/a"), ("POST", "/a/pin"), ("DELETE", "/a/pin")]
        for method, path in [*paths, ("DELETE", "/a")]:
            answer = live.client.request(method, f"/v1/documents{path}")
            assert answer.status_code == 408, (method, path)
            assert answer.json()["error"]["code"] == "deadline_exceeded"
            assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("stands_still", ["at once", "on the way"])
def test_a_registration_does_not_take_longer_than_a_request_may(
    monkeypatch: pytest.MonkeyPatch, stands_still: str
) -> None:
    async def register(*_: object, **__: object) -> AsyncIterator[DocumentInfo]:
        if stands_still == "on the way":
            yield DocumentInfo("a", None, 9, 3, "computing", 1, 1, False, 0, 0, 0, 0.0, None)
        await never()

    text = {"text": "The archive is in the north wing."}
    with live_server(config={"deadline": 0.05}) as live:
        monkeypatch.setattr(live.service.llm, "register", register)
        waiting = live.post("/v1/documents", text)
        at_once = live.post("/v1/documents", {**text, "wait": False})
        if stands_still == "at once":
            streaming = live.post("/v1/documents", {**text, "stream": True})
            assert at_once.status_code == streaming.status_code == 408
        else:
            assert at_once.status_code == 202
            told, error = live.events("/v1/documents", {**text, "stream": True})
            assert (told["tokens_done"], error["error"]["code"]) == (3, "deadline_exceeded")
        assert waiting.status_code == 408
        assert waiting.json()["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize("deed", ["register", "pin", "delete"])
def test_what_writes_a_record_down_does_not_take_longer_than_a_request_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deed: str
) -> None:
    engine = {"disk_path": str(tmp_path), "disk_gib": 0.1}
    with live_server(config={"deadline": 5.0}, engine=engine) as live:
        text = {"text": "The archive is in the north wing.", "id": "a"}
        assert live.post("/v1/documents", text).status_code == 201
        ways = {"register": ("POST", ""), "pin": ("POST", "/a/pin"), "delete": ("DELETE", "/a")}
        if deed == "pin":
            monkeypatch.setattr(live.service.records, "lock", Never())
        else:
            monkeypatch.setattr(live.service.llm, "document", never)
        # what comes before it may be as slow as this machine is
        live.service.config = replace(live.service.config, deadline=0.5)
        method, path = ways[deed]
        body = {"json": text} if deed == "register" else {}
        answer = live.client.request(method, f"/v1/documents{path}", timeout=20, **body)
        assert answer.status_code == 408


async def never(*_: object, **__: object) -> None:
    await asyncio.Event().wait()


class Never:
    """A lock that somebody holds for ever."""

    async def __aenter__(self) -> None:
        await never()

    async def __aexit__(self, *_: object) -> None:
        pass

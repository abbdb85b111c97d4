"""A server whose engine stands still says so to probes and scrapes, and to who asks."""

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

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
    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    with live_server(config={"deadline": 0.05}) as live:
        for name in ("documents", "document", "pin", "unpin", "delete"):
            monkeypatch.setattr(live.service.llm, name, never)
        paths = [("GET", ""), ("GET", "/a"), ("POST", "/a/pin"), ("DELETE", "/a/pin")]
        for method, path in [*paths, ("DELETE", "/a")]:
            answer = live.client.request(method, f"/v1/documents{path}")
            assert answer.status_code == 408, (method, path)
            assert answer.json()["error"]["code"] == "deadline_exceeded"

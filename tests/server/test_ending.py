"""How a server ends: by which signal, with which status, and what it answers meanwhile."""

import asyncio
import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from looseleaf.config import ServerConfig
from looseleaf.prompt.request import SystemPrompt
from looseleaf.server.run import EXIT_BROKEN, EXIT_CUT, Server
from looseleaf.server.service import Service, make_service
from tests.server.live import chat_body
from tests.server.test_drain import started

LONG = chat_body(stream=True, max_tokens=3800, ignore_eos=True)

BROKEN = """
from looseleaf.engine.engine import Engine
step, left = Engine.step, [20]
def faulty(engine):
    left[0] -= 1
    if left[0] < 0:
        raise MemoryError("planted")
    return step(engine)
Engine.step = faulty
"""
STUCK = """
import threading
from looseleaf.engine.engine import Engine
from looseleaf.server import service
service.STEP_PATIENCE = 0.1
Engine.step = lambda engine: threading.Event().wait()
"""


class Running:
    """A server in a process of its own, with a client for it."""

    def __init__(self, process: "subprocess.Popen[str]", client: httpx.Client) -> None:
        self.process, self.client = process, client

    @contextmanager
    def streaming(self, tokens: int = 3800) -> Iterator[Iterator[str]]:
        """The lines of a long answer that has begun."""
        body = {**LONG, "max_tokens": tokens}
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            yield lines

    def end(self) -> tuple[int, list[Any]]:
        """The exit status, and the log."""
        _, log = self.process.communicate(timeout=60)
        return self.process.returncode, [json.loads(line) for line in log.splitlines()]


@contextmanager
def running(*arguments: str, plant: str = "") -> Iterator[Running]:
    process, url = started(*arguments, plant=plant)
    try:
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            yield Running(process, client)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_while_it_drains_probes_and_scrapes_are_answered_and_requests_refused() -> None:
    with running() as server:
        with server.streaming(1200) as lines:
            server.process.send_signal(signal.SIGTERM)
            # over new connections, as a prober's and a load balancer's are
            with httpx.Client(base_url=server.client.base_url, trust_env=False) as other:
                while other.get("/ready").status_code == 200:
                    pass
                assert other.get("/ready").json() == {"status": "draining"}
                assert other.get("/health").json() == {"status": "ok"}
                assert "looseleaf_engine_up 1.0" in other.get("/metrics").text
                refused = other.post("/v1/chat/completions", json=chat_body())
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert refused.headers["connection"] == "close"
            assert list(lines)[-1] == "data: [DONE]"
        status, log = server.end()
    assert status == 0
    assert (log[-1]["event"], log[-1]["whole"]) == ("stopped", True)


@pytest.mark.parametrize(
    ("signals", "processes"),
    [((signal.SIGTERM, signal.SIGTERM), 0), ((signal.SIGTERM, signal.SIGINT), 1)],
)
def test_a_second_signal_does_not_wait_and_the_last_line_says_so(
    signals: Sequence[signal.Signals], processes: int
) -> None:
    with running("--api-processes", str(processes)) as server:
        with server.streaming() as lines:
            server.process.send_signal(signals[0])
            while server.client.get("/ready").status_code == 200:
                pass
            server.process.send_signal(signals[1])
            with contextlib.suppress(httpx.RemoteProtocolError):
                assert "data: [DONE]" not in list(lines)
        status, log = server.end()
    assert status == EXIT_CUT
    assert (log[-1]["event"], log[-1]["whole"]) == ("stopped", False)
    assert not [entry for entry in log if entry["level"] == "error"]


@pytest.fixture
def heeding_hangups() -> Iterator[None]:
    """Processes begun here heed SIGHUP, also where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heeding_hangups")
def test_a_terminal_that_goes_away_lets_answers_end() -> None:
    with running() as server:
        with server.streaming(300) as lines:
            server.process.send_signal(signal.SIGHUP)
            server.process.send_signal(signal.SIGHUP)
            assert list(lines)[-1] == "data: [DONE]"
        status, log = server.end()
    assert status == 0
    assert (log[-1]["event"], log[-1]["whole"]) == ("stopped", True)


def test_an_engine_that_breaks_ends_the_server_with_a_status_of_its_own() -> None:
    with running(plant=BROKEN) as server:
        answer = server.client.post("/v1/chat/completions", json={**LONG, "stream": False})
        assert answer.status_code == 500
        status, log = server.end()
    assert status == EXIT_BROKEN
    assert (log[-1]["event"], log[-1]["whole"]) == ("stopped", False)
    assert any("the engine is broken" in entry.get("text", "") for entry in log)


def test_an_engine_that_stands_still_does_not_keep_the_server_from_ending() -> None:
    with running("--drain-seconds", "0.2", plant=STUCK) as server:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.client.post, "/v1/chat/completions", json=LONG)
            while "looseleaf_engine_busy_seconds 0.0" in server.client.get("/metrics").text:
                pass
            server.process.send_signal(signal.SIGTERM)
            answer = asked.result(60)
        status, log = server.end()
    assert "shutting_down" in answer.text
    assert status == EXIT_BROKEN
    assert (log[-1]["event"], log[-1]["whole"]) == ("stopped", False)


def test_a_drain_that_has_run_out_gives_nothing_more() -> None:
    service = make_service(None, ServerConfig(drain_seconds=0.01), {"num_pages": 64})
    drain, given = service.llm.drain, []

    async def noted(timeout: float, **options: Any) -> bool:
        given.append(timeout)
        return await drain(timeout, **options)

    service.llm.drain = noted  # type: ignore[method-assign, assignment]

    async def cut() -> bool:
        with service.track_request():
            return await service.stop()

    assert not asyncio.run(cut())
    assert given == [0.0]


def test_who_is_told_to_end_while_system_prompts_are_computed_ends_before_the_next_one(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for number in range(3):
        path = tmp_path / f"{number}.txt"
        path.write_text(f"Answer in {number} words.")
        texts.append(f"model-{number}={path}")
    config = ServerConfig(port=0, system_prompt=tuple(texts), log_level="error")
    service = make_service(None, config, {"num_pages": 64})
    server, hold, held = Server(service), service.llm.hold_system_prompt, []

    async def asked_to_end(text: str) -> SystemPrompt:
        prompt = await hold(text)
        held.append(text)
        server.handle_exit(signal.SIGTERM, None)
        return prompt

    monkeypatch.setattr(service.llm, "hold_system_prompt", asked_to_end)
    asyncio.run(server.serve())
    service.llm.close()
    assert len(held) == 1
    assert not server.started


def test_a_service_knows_how_it_ended() -> None:
    service = make_service(None, ServerConfig(), {"num_pages": 64})
    assert service.whole is None
    assert asyncio.run(Service.stop(service))
    assert service.whole

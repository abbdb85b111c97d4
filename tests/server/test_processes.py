"""A server of several processes: the loss of each, and limits over all."""

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from looseleaf.server.names import REFERENCE_NAME
from looseleaf.server.processes.samples import exposition
from looseleaf.server.processes.starting import StartingServer
from looseleaf.server.records import Record, Records, Registration, record_name
from looseleaf.server.run import EXIT_BROKEN
from tests.server.live import DOCUMENT, chat_body
from tests.server.test_ending import LONG, Running, running

PATIENCE = 60.0


def processes(server: Running, kind: str) -> list[psutil.Process]:
    """The engine's process, or those of the API."""
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if f"processes.{kind}" in " ".join(child.cmdline())]


@contextmanager
def connected(server: Running) -> Iterator[httpx.Client]:
    """A client with a connection of its own, to whichever API process takes it."""
    with httpx.Client(base_url=server.client.base_url, timeout=60, trust_env=False) as client:
        yield client


@contextmanager
def streaming(server: Running, tokens: int = 3800) -> Iterator[Iterator[str]]:
    body = {**LONG, "max_tokens": tokens}
    with (
        connected(server) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        yield lines


def ask(server: Running, **fields: Any) -> Any:
    with connected(server) as client:
        return client.post("/v1/chat/completions", json=chat_body(**fields)).json()


def wait_until_ready(server: Running) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            with connected(server) as client:
                if client.get("/ready").status_code == 200:
                    return
        except httpx.TransportError:
            pass
    raise AssertionError("the server is not ready again")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two API processes over one engine, with a disk tier."""
    disk = tmp_path_factory.mktemp("tier")
    with running("--api-processes", "2", "--dtype", "float32", "--disk-path", str(disk)) as server:
        yield server
        server.process.terminate()
        status, log = server.end()
        assert status == 0
        assert (log[-1]["event"], log[-1]["whole"]) == ("stopped", True)


def test_answers_and_metrics_are_those_of_one_server(server: Running) -> None:
    documents = [{"text": DOCUMENT}]
    answers = [ask(server, documents=documents, stop=["Tolland"]) for _ in range(6)]
    texts = {answer["choices"][0]["message"]["content"] for answer in answers}
    assert len(texts) == 1 and "Tolland" not in texts.pop()
    assert {answer["choices"][0]["finish_reason"] for answer in answers} == {"stop"}
    # one process computes the document for both
    sources = [answer["looseleaf"]["documents"][0]["source"] for answer in answers]
    assert sources == ["computed"] + 5 * ["cached"]
    with connected(server) as client:
        metrics = client.get("/metrics").text
    answered = 'looseleaf_http_responses_total{route="/v1/chat/completions",status="200"} 6.0'
    assert answered in metrics.splitlines()
    assert 'looseleaf_requests_total{end="finished"} 6.0' in metrics.splitlines()


def test_a_stored_response_is_known_to_all_processes(server: Running) -> None:
    body = {"model": REFERENCE_NAME, "input": "Who signs?", "max_output_tokens": 2}
    with connected(server) as client:
        first = client.post("/v1/responses", json=body).json()
    path = f"/v1/responses/{first['id']}"
    for _ in range(6):
        with connected(server) as client:
            assert client.get(path).json() == first
            items = client.get(f"{path}/input_items").json()["data"]
            assert [item["content"] for item in items] == ["Who signs?"]
    with connected(server) as client:
        later = client.post("/v1/responses", json={**body, "previous_response_id": first["id"]})
        assert later.json()["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        assert client.delete(path).json()["deleted"] is True
    with connected(server) as client:
        assert client.get(path).status_code == 404


def test_an_engine_that_is_killed_ends_its_requests_and_starts_again(server: Running) -> None:
    with connected(server) as client:
        body = {"id": "kept", "text": DOCUMENT}
        assert client.post("/v1/documents", json=body).json()["stored"] is True
    (engine,) = processes(server, "engine")
    with ExitStack() as stack:
        streams = [stack.enter_context(streaming(server)) for _ in range(4)]
        begun = time.monotonic()
        engine.kill()
        with ThreadPoolExecutor(4) as pool:
            ends = [lines[-2:] for lines in pool.map(list, streams)]
        assert time.monotonic() - begun < 2.0
    for error, end in ends:
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_lost"
        assert end == "data: [DONE]"
    with connected(server) as client:
        assert client.get("/health").status_code == 503
        assert client.get("/health").json() == {"status": "restarting"}
        refused = client.post("/v1/chat/completions", json=chat_body())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "restarting")
        assert "looseleaf_engine_up 0.0" in client.get("/metrics").text
    wait_until_ready(server)
    end = time.monotonic() + PATIENCE
    while "error" in (answer := ask(server, documents=[{"id": "kept"}])):
        # the document returns from its record
        assert answer["error"]["code"] in ("document_coming", "document_not_found")
        assert time.monotonic() < end
    assert answer["looseleaf"]["documents"][0]["source"] in ("loaded", "cached")


def test_an_api_process_that_is_killed_takes_only_its_own_requests_along(server: Running) -> None:
    first, second = processes(server, "api")
    with ExitStack() as stack:
        streams = [stack.enter_context(streaming(server, 300)) for _ in range(6)]
        first.kill()

        def completes(lines: Iterator[str]) -> bool:
            try:
                return [*lines][-1] == "data: [DONE]"
            except httpx.RemoteProtocolError:
                return False

        with ThreadPoolExecutor(6) as pool:
            complete = list(pool.map(completes, streams))
    with connected(server) as client:
        # connections of the lost process are reset; the kernel sends new ones to the other
        assert client.get("/health").status_code == 200
    end = time.monotonic() + PATIENCE
    while len(apis := processes(server, "api")) < 2:
        assert time.monotonic() < end
    assert second in apis and first not in apis
    # the engine has dropped the lost requests and completed the others
    with connected(server) as client:
        metrics = client.get("/metrics").text
    assert f'looseleaf_requests_total{{end="aborted"}} {6.0 - sum(complete)}' in metrics
    assert ask(server)["choices"]


def test_nothing_outlives_the_parent() -> None:
    with running("--api-processes", "1", "--num-pages", "64") as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len(children) == 2
        with streaming(server):
            server.process.kill()
            _, alive = psutil.wait_procs(children, timeout=PATIENCE)
        assert not alive


def test_limits_hold_over_all_processes_and_the_last_engine_ends_the_server() -> None:
    options = ("--requests-per-minute", "5", "--engine-restarts", "0", "--num-pages", "64")
    with running("--api-processes", "2", *options) as server:
        answers = [ask(server, max_tokens=1) for _ in range(12)]
        assert sum("choices" in answer for answer in answers) == 5
        refused = {a["error"]["code"] for a in answers if "error" in a}
        assert refused == {"rate_limit_exceeded"}
        (engine,) = processes(server, "engine")
        engine.kill()
        status, log = server.end()
    assert status == EXIT_BROKEN
    assert (log[-1]["event"], log[-1]["whole"]) == ("stopped", False)
    lost = next(entry for entry in log if entry["event"] == "engine_lost")
    assert (lost["status"], lost["starts_again"]) == (-9, False)


def test_a_process_that_cannot_start_says_why() -> None:
    options = ("--api-processes", "1", "--device", "nonsense", "--port", "0")
    command = [sys.executable, "-m", "looseleaf", "serve", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "looseleaf: unknown --device 'nonsense': use auto, cpu or cuda\n"


def test_metrics_of_processes_add_up() -> None:
    def family(name: str, kind: str, value: float) -> Any:
        return (name, "Help.", kind, [(f"{name}_total" if kind == "counter" else name, {}, value)])

    first = [family("a", "counter", 2.0), family("g", "gauge", 1.0)]
    text = exposition([first, [family("a", "counter", 3.0), family("g", "gauge", 0.0)]]).decode()
    assert "a_total 5.0" in text.splitlines()
    assert "g 1.0" in text.splitlines()


def test_a_server_that_starts_says_so_and_hands_its_socket_on() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            starting = StartingServer()
            await starting.open(listener)
            async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
                ready = await client.get("/ready")
                assert (ready.status_code, ready.json()) == (503, {"status": "starting"})
                refused = await client.post("/v1/chat/completions", content=b"x" * 500_000)
                assert refused.json()["error"]["code"] == "starting"
                assert refused.headers["retry-after"] == "1"
            await starting.close()
            # connections of the meantime wait for the successor
            _, writer = await asyncio.open_connection(*listener.getsockname())
            listener.setblocking(False)
            accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
            accepted.close()
            writer.close()

    asyncio.run(scenario())


def test_processes_share_their_records(tmp_path: Path) -> None:
    async def scenario() -> None:
        first, second = (Records(str(tmp_path), "model", shared=True) for _ in range(2))
        registration = Registration(model="model", system=None, hosted=False, index="graph")
        record = Record(
            tenant="", id="d", title=None, text="Text.", pinned=False, registrations=[registration]
        )
        assert second.keeps("", "d") is False
        async with first.lock:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05), second.lock:
                    pass
            first.write(record)
        async with second.lock:
            assert second.keeps("", "d") is True
        assert [*Records(str(tmp_path), "model").coming] == [record_name("", "d")]

    asyncio.run(scenario())

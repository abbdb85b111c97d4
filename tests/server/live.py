"""A live server: uvicorn on a free port of the loopback, in a thread, over a tiny model or the
reference model, with what tests need to look behind it."""

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from looseleaf.config import ServerConfig
from looseleaf.engine.engine import Engine
from looseleaf.engine.reports.stats import EngineSnapshot
from looseleaf.server.names import REFERENCE_NAME
from looseleaf.server.run import Server
from looseleaf.server.service import Service, make_service

DOCUMENT = "Mira Tolland signs travel requests. The archive is in the north wing."
QUESTION = "Who signs travel requests?"


@dataclass(eq=False)
class Live:
    """A running server and a client for it."""

    server: Server
    service: Service
    client: httpx.Client
    loop: asyncio.AbstractEventLoop = field(repr=False)

    @property
    def url(self) -> str:
        return str(self.client.base_url).rstrip("/")

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def chat(self, *, key: str | None = None, **fields: Any) -> httpx.Response:
        """A greedy question; fields replace or join the body's."""
        return self.post("/v1/chat/completions", chat_body(**fields), headers=bearer(key))

    def events(self, path: str, body: Any, key: str | None = None) -> list[dict[str, Any]]:
        """All events of a stream, which must end with [DONE]."""
        with self.client.stream("POST", path, json=body, headers=bearer(key)) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in response.iter_lines() if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def call(self, function: Any) -> Any:
        """What ``function`` says of the engine, asked between two of its steps."""

        async def ask() -> Any:
            return await self.service.llm.call(function)

        return asyncio.run_coroutine_threadsafe(ask(), self.loop).result(30)

    def now(self) -> EngineSnapshot:
        """The engine between two steps; `AsyncLLM.snapshot` may be a step behind."""
        snapshot: EngineSnapshot = self.call(Engine.snapshot)
        return snapshot

    def check_engine(self) -> None:
        """Every page is accounted for."""
        self.call(Engine.check)

    def wait_until_idle(self) -> None:
        """Returns when the engine has nothing to do and no page belongs to a running output."""

        async def idle() -> None:
            watch = self.service.llm._calls.watch
            await watch(lambda: not self.service.llm.engine.has_work or None)

        asyncio.run_coroutine_threadsafe(idle(), self.loop).result(60)
        self.check_engine()
        pages = self.now().pages
        assert pages.tails == 0 and pages.referenced == 0
        assert self.service.queue.reserved == 0


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def chat_body(**fields: Any) -> dict[str, Any]:
    """A small greedy chat request."""
    body: dict[str, Any] = {
        "model": REFERENCE_NAME,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 16,
    }
    return {name: value for name, value in {**body, **fields}.items() if value is not None}


@contextmanager
def live_server(
    model: Path | None = None,
    config: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
) -> Iterator[Live]:
    """A server that is ready; at the end it drains, and nothing may have been lost."""
    settings = ServerConfig(**{"port": 0, "log_level": "error", **(config or {})})
    options = {"dtype": "float32", "device": "cpu", "num_pages": 1024, **(engine or {})}
    service = make_service(None if model is None else str(model), settings, options)
    server = Server(service)
    started = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve()

    def startup_told(start: Any) -> Any:
        async def startup(sockets: Any = None) -> None:
            await start(sockets)
            started.set()

        return startup

    server.startup = startup_told(server.startup)  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    try:
        assert started.wait(60), "the server did not start"
        url = f"http://127.0.0.1:{server.bound_port}"
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            yield Live(server, service, client, loops[0])
    finally:
        server.should_exit = True
        thread.join(60)
        service.llm.close()
    assert not thread.is_alive(), "the server did not end"

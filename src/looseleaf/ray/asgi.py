"""Calls of an ASGI application without a socket: its lifespan, and streamed answers."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Message

_MAX_MESSAGES = 64
"""Messages of one response that wait for their reader."""


class AsgiApp:
    """An application with its lifespan. `start` precedes all calls, `stop` ends it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._events: asyncio.Queue[Message] = asyncio.Queue()
        self._answers: asyncio.Queue[Message] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Run the application's startup. Raises its error."""
        self._task = asyncio.create_task(self._live())
        await self._exchange("lifespan.startup")

    async def stop(self) -> None:
        """Run the application's shutdown, which may drain running requests."""
        if self._task is not None and not self._task.done():
            await self._exchange("lifespan.shutdown")
            await self._task

    async def call(
        self, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> AsyncIterator[Message]:
        """The messages of a response; leaving the loop disconnects the client."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue(_MAX_MESSAGES)
        gone = asyncio.Event()
        requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if requests:
                return requests.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app(_scope(method, path, headers), receive, messages.put)
            finally:
                # a reader that has left takes nothing from a full queue
                if not gone.is_set():
                    await messages.put(None)

        task = asyncio.create_task(run())
        try:
            while (message := await messages.get()) is not None:
                yield message
            await task
        finally:
            gone.set()
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task

    async def _live(self) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0"}}
        await self._app(scope, self._events.get, self._answers.put)

    async def _exchange(self, kind: str) -> None:
        assert self._task is not None, "the application runs"
        await self._events.put({"type": kind})
        answer = asyncio.create_task(self._answers.get())
        await asyncio.wait({answer, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            self._task.result()
        elif answer.result()["type"].endswith("failed"):
            raise RuntimeError(answer.result().get("message", kind))


def _scope(method: str, path: str, headers: Sequence[tuple[str, str]]) -> dict[str, Any]:
    route, _, query = path.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(route),
        "raw_path": route.encode("latin-1"),
        "query_string": query.encode("latin-1"),
        "root_path": "",
        "headers": [(n.lower().encode("latin-1"), v.encode("latin-1")) for n, v in headers],
        "client": None,
        "server": None,
    }

"""Cancels the work of a request when its client disconnects, with or without a stream."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from looseleaf.server.errors import ClientGone

T = TypeVar("T")

# clients may split a stream at these line ends, as Python's splitlines does
_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})

Event = dict[str, Any]


async def until_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of ``work``. Cancels it and raises ClientGone when the client disconnects.

    Call it after the request's body was read."""
    task = asyncio.ensure_future(work)
    listener = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({task, listener}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await cancel(task, listener)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel tasks and wait for their cleanup."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events, one JSON object each, and ``[DONE]`` at the end.

    ``events`` yields at least one event, and yields errors as events. It is always closed."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[Event, None]) -> None:
        self._events = events
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            # start the generator first: closing an unstarted generator runs none of its code
            first = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send(_body(first))
            async for event in events:
                await send(_body(event))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def _body(event: Event) -> dict[str, Any]:
    return {"type": "http.response.body", "body": line(event), "more_body": True}


def line(event: Event) -> bytes:
    """The bytes of one event."""
    text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text.translate(_LINE_ENDS)}\n\n".encode("utf-8", "replace")

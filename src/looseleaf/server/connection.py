"""Cancels the work of a request when its client disconnects, with or without a stream."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from looseleaf.server.errors import ClientGone
from looseleaf.server.events import DONE, Event, line

T = TypeVar("T")


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
    """Server-sent events, one JSON object each, and ``end`` at the end.

    ``batches`` yields lists of events, at least one, and yields errors as events. It is always
    closed. A batch is one write; the next one has all that the answer gained in the meantime."""

    media_type = "text/event-stream"

    def __init__(
        self,
        batches: AsyncGenerator[list[Event], None],
        headers: Mapping[str, str] | None = None,
        end: bytes = DONE,
    ) -> None:
        self._batches, self._end = batches, end
        fixed = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers={**fixed, **(headers or {})})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with aclosing(self._batches) as batches:
            # start the generator first: closing an unstarted generator runs none of its code
            first = await anext(batches)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send(_body(first))
            async for batch in batches:
                await send(_body(batch))
        await send({"type": "http.response.body", "body": self._end})


def _body(batch: list[Event]) -> dict[str, Any]:
    content = line(batch[0]) if len(batch) == 1 else b"".join(map(line, batch))
    return {"type": "http.response.body", "body": content, "more_body": True}

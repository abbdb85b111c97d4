"""Time limits for clients: of a complete body, and of an unread piece of a response."""

import asyncio
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from starlette.types import Message, Send

from looseleaf.server.errors import ClientGone

BODY_SECONDS = 60.0
"""Time limit for a complete body."""

STALL_SECONDS = 60.0
"""Time limit for a client to read one piece of a response."""


async def send_within(seconds: float, send: Send, message: Message) -> None:
    """Send a piece of a response. Raises ClientGone if the client does not read it in time."""
    # usually the write is complete without a wait, and a timer per write is expensive
    sending = send(message).__await__()
    try:
        waits_for = next(sending)
    except StopIteration:
        return
    try:
        async with asyncio.timeout(seconds):
            await _Begun(sending, waits_for)
    except TimeoutError as error:
        raise ClientGone from error


@dataclass(eq=False)
class _Begun:
    """The rest of a coroutine whose first step has returned ``waits_for``."""

    coroutine: Generator[Any, None, None]
    waits_for: Any

    def __await__(self) -> Generator[Any, None, None]:
        yield self.waits_for
        yield from self.coroutine

"""Connections whose caller does nothing any more: they are closed after a while.

uvicorn waits as long as the caller likes for the head of a request, and for the rest of an answer
to be read once it has closed the connection. What a request may take for its body, and for reading
a piece of its answer, is in `gate`."""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

LOOK_SECONDS = 30.0
"""How often each connection is looked at; it ends when two looks find the same standstill."""


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's own connection, with an end to its patience."""

    _look: asyncio.TimerHandle | None = None
    _standstill: object = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def _look_later(self) -> None:
        self._look = self.loop.call_later(LOOK_SECONDS, self._look_now)

    def _look_now(self) -> None:
        before, self._standstill = self._standstill, self._waits_for()
        if before is None or before != self._standstill:
            self._look_later()
        elif self.transport.is_closing():
            # to close it once more would wait for the same bytes to be read
            self.transport.abort()
        else:
            self.transport.close()
            self._look_later()

    def _waits_for(self) -> object:
        """What the caller has to do next, None if it is not the caller's turn."""
        if self.transport.is_closing():
            # nothing is added any more, so less is left whenever something has been read
            return "reading", self.transport.get_write_buffer_size()
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering or self.timeout_keep_alive_task is not None:
            return None
        return "a head", self.cycle

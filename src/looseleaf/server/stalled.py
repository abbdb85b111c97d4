"""Connections whose caller does nothing any more: they are closed after a while.

uvicorn waits as long as the caller likes for the head of a request, and for the rest of an answer
to be read once it has closed the connection. What a request may take for its body, and for reading
a piece of its answer, is in `gate`."""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from looseleaf.server.open_connections import OpenConnections

LOOK_SECONDS = 30.0
"""How often each connection is looked at; it ends when two looks find the same standstill."""


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's own connection, with an end to its patience, and to the number of its kind."""

    _look: asyncio.TimerHandle | None = None
    _standstill: object = None

    def __init__(self, *, places: OpenConnections, **options: Any) -> None:
        super().__init__(**options)
        self._places = places

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._look_later()
        self._places.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
        self._places.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering:
            self._places.busy(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # the next request may have come along with this one
        if not self._is_answering and not self.transport.is_closing():
            self._places.idle(self)

    def give_way(self) -> None:
        self.transport.abort()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

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
        if self._is_answering or self.timeout_keep_alive_task is not None:
            return None
        return "a head", self.cycle

"""Closes connections whose client makes no progress.

uvicorn has no timeout for request heads, nor for unread data of a closing connection. The
timeouts of bodies and responses are in `client_pace`."""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from looseleaf.server.open_connections import OpenConnections

CHECK_SECONDS = 30.0
"""Interval of checks; two checks in the same state close the connection."""


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's connection with timeouts, and a limit on open connections."""

    _timer: asyncio.TimerHandle | None = None
    _stalled_state: object = None

    def __init__(self, *, connections: OpenConnections, **options: Any) -> None:
        super().__init__(**options)
        self._connections = connections

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._schedule_check()
        self._connections.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._connections.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering:
            self._connections.busy(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # the next request may have arrived with this one
        if not self._is_answering and not self.transport.is_closing():
            self._connections.idle(self)

    def close_idle(self) -> None:
        self.transport.abort()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _schedule_check(self) -> None:
        self._timer = self.loop.call_later(CHECK_SECONDS, self._check)

    def _check(self) -> None:
        previous, self._stalled_state = self._stalled_state, self._client_state()
        if previous is None or previous != self._stalled_state:
            self._schedule_check()
        elif self.transport.is_closing():
            # a second close would wait for the same unread bytes
            self.transport.abort()
        else:
            self.transport.close()
            self._schedule_check()

    def _client_state(self) -> object:
        """The client's next action and its progress, None while the server acts."""
        if self.transport.is_closing():
            # the buffer of a closing connection shrinks with every read
            return "reading", self.transport.get_write_buffer_size()
        if self._is_answering or self.timeout_keep_alive_task is not None:
            return None
        return "a head", self.cycle

"""The answers of an API process before the engine is loaded: 503 to every request."""

import asyncio
import contextlib
import json
import socket

from looseleaf.server.errors import unavailable

_MAX_CONNECTIONS = 256
_MAX_HEAD = 1 << 16
_SECONDS = 5.0
"""Time limit for the head of a request, and for its client to read the answer."""

_PROBES = (b"/health", b"/ready")


class StartingServer:
    """Answers at a bound socket until `close`, which keeps the socket open for its successor."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, listener: socket.socket) -> None:
        """Answer the connections of a bound socket."""
        # the server closes its copy only, so connections go on to wait in the kernel's queue
        self._server = await asyncio.start_server(
            self._answer, sock=listener.dup(), limit=_MAX_HEAD, start_serving=True
        )

    async def close(self) -> None:
        """Take no more connections, and complete the answers under way."""
        if self._server is not None:
            self._server.close()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=_SECONDS)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a connection has a task"
        self._tasks.add(task)
        try:
            errors = OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError
            with contextlib.suppress(*errors):
                if len(self._tasks) <= _MAX_CONNECTIONS:
                    async with asyncio.timeout(_SECONDS):
                        head = await reader.readuntil(b"\r\n\r\n")
                        writer.write(_response(head))
                        writer.write_eof()
                        # closing a connection with unread data would discard the answer
                        while await reader.read(_MAX_HEAD):
                            pass
        finally:
            self._tasks.discard(task)
            writer.close()


def _response(head: bytes) -> bytes:
    method, _, rest = head.partition(b" ")
    path = rest.split(b" ", 1)[0].split(b"?", 1)[0]
    refusal = unavailable("the server starts: ask again in a moment", "starting")
    body = json.dumps(
        {"status": "starting"} if path in _PROBES else refusal.body_for(path.decode("latin-1"))
    ).encode()
    lines = (
        "HTTP/1.1 503 Service Unavailable",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Retry-After: 1",
        "Connection: close",
        "\r\n",
    )
    return "\r\n".join(lines).encode() + (b"" if method == b"HEAD" else body)

"""A small HTTP/1.1 client on asyncio streams: its time per chunk bounds the load of a process."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlsplit

from looseleaf.errors import InvalidOption
from looseleaf_lab.bench.endpoint.figures import Answer
from looseleaf_lab.bench.endpoint.workload import Endpoint, Prompt, make_body

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_LIMIT = 1 << 22


class Client:
    """Requests to one endpoint; connections are reused after complete responses.

    Raises InvalidOption for a URL that is not http or https."""

    def __init__(self, endpoint: Endpoint, clock: Callable[[], float], timeout: float) -> None:
        parts = urlsplit(endpoint.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidOption(f"{endpoint.url!r} is no http or https URL")
        self._endpoint, self._clock, self._timeout = endpoint, clock, timeout
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname
        self._port = parts.port or (443 if self._tls else 80)
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._idle: list[Connection] = []

    async def stream(self, prompt: Prompt, start: float | None = None) -> Answer:
        """The answer to a streamed request; its time starts at ``start`` or now."""
        begin = self._clock() if start is None else start
        path = "/v1/chat/completions" if self._endpoint.kind == "chat" else "/v1/completions"
        body = json.dumps(make_body(self._endpoint, prompt)).encode()
        reading = _Reading(self._clock)
        error = ""
        try:
            async with asyncio.timeout(self._timeout):
                status, pieces = await self._send("POST", path, body)
                async for piece in pieces:
                    if status == 200:
                        reading.feed(piece)
            error = reading.error if status == 200 else f"status {status}"
        except TimeoutError:
            error = "timeout"
        except (OSError, EOFError, ValueError):
            error = "connection"
        return Answer(
            begin,
            tuple(reading.chunks),
            reading.tokens or len(reading.chunks),
            reading.prompt_tokens,
            error,
        )

    async def fetch(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """Status and body of a plain request. Raises OSError, EOFError or TimeoutError."""
        async with asyncio.timeout(self._timeout):
            data = b"" if body is None else json.dumps(body).encode()
            status, pieces = await self._send(method, path, data)
            return status, b"".join([piece async for piece in pieces])

    def close(self) -> None:
        """Closes idle connections."""
        while self._idle:
            self._idle.pop()[1].close()

    async def _send(self, method: str, path: str, body: bytes) -> tuple[int, AsyncIterator[bytes]]:
        head = (
            f"{method} {self._base}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        )
        if self._endpoint.key:
            head += f"Authorization: Bearer {self._endpoint.key}\r\n"
        request = head.encode() + b"\r\n" + body
        while self._idle:
            connection = self._idle.pop()
            try:
                return await self._exchange(connection, request)
            except (OSError, EOFError):
                # the server closed the idle connection
                connection[1].close()
        connection = await asyncio.open_connection(
            self._host, self._port, ssl=self._tls, limit=_LIMIT
        )
        return await self._exchange(connection, request)

    async def _exchange(
        self, connection: Connection, request: bytes
    ) -> tuple[int, AsyncIterator[bytes]]:
        reader, writer = connection
        writer.write(request)
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {}
        for line in head[1:]:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip().lower()
        return int(head[0].split(" ", 2)[1]), self._body(connection, headers)

    async def _body(self, connection: Connection, headers: dict[str, str]) -> AsyncIterator[bytes]:
        reader, writer = connection
        reusable = False
        try:
            if headers.get("transfer-encoding") == "chunked":
                while size := int((await reader.readline()).split(b";")[0], 16):
                    yield (await reader.readexactly(size + 2))[:-2]
                while (await reader.readline()).strip():
                    pass
                reusable = True
            elif "content-length" in headers:
                yield await reader.readexactly(int(headers["content-length"]))
                reusable = True
            else:
                while piece := await reader.read(1 << 16):
                    yield piece
        finally:
            if reusable and headers.get("connection") != "close":
                self._idle.append(connection)
            else:
                writer.close()


class _Reading:
    """Chunks and counts of a stream of events."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._rest = clock, b""
        self.chunks: list[float] = []
        self.tokens = self.prompt_tokens = 0
        self._failed = self._ended = False

    @property
    def error(self) -> str:
        """The kind of the stream's error, or ""."""
        if self._failed:
            return "error in the stream"
        if not self._ended:
            return "stream without an end"
        return "" if self.chunks else "empty answer"

    def feed(self, piece: bytes) -> None:
        """Reads events, which all have the time of this call. Raises ValueError for bad JSON."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        now = self._clock()
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                self._ended = True
                continue
            event = json.loads(data)
            if not isinstance(event, dict):
                raise ValueError("an event is a JSON object")
            self._failed = self._failed or "error" in event
            if usage := event.get("usage"):
                self.tokens = usage.get("completion_tokens") or 0
                self.prompt_tokens = usage.get("prompt_tokens") or 0
            if any(_has_text(choice) for choice in event.get("choices") or ()):
                self.chunks.append(now)


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    fields = (choice.get("text"), delta.get("content"), delta.get("reasoning_content"))
    return any(fields) or bool(delta.get("reasoning"))

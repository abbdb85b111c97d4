"""The proxy as an ASGI application: bodies, rate limits, errors and streams of clients."""

import asyncio
import hashlib
import json
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from looseleaf.proxy.documents import PATH as DOCUMENTS_PATH
from looseleaf.proxy.documents import answer_documents
from looseleaf.proxy.fleet import Call, ReplicaLost
from looseleaf.proxy.forwarder import Answer, Forwarder
from looseleaf.router import affinity_of
from looseleaf.server.client_pace import BODY_SECONDS, STALL_SECONDS, send_within
from looseleaf.server.errors import ApiError, ClientGone
from looseleaf.server.keys import host_name, is_loopback
from looseleaf.server.limits import KeyLimits

CUT = (
    "the replica ended before its answer was complete: what has arrived is incomplete, so send the "
    "request again"
)
"""The message at the end of a stream whose replica was lost."""

_MAX_KEYS = 65_536
_OWN = ("/health", "/ready", "/metrics")
_SESSION_HEADER = "x-session-id"


@dataclass(eq=False)
class _Client:
    """One request of a client, and whether its response has begun."""

    receive: Receive
    send: Send
    begun: bool = False

    async def read(self, max_bytes: int) -> bytes:
        """The body. Raises ApiError above its size (413) or time (408), and ClientGone."""
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await self._read(max_bytes)
        except TimeoutError as error:
            raise ApiError(
                408,
                "the body did not arrive: send it again",
                code="slow_body",
                headers={"Connection": "close"},
            ) from error

    async def _read(self, max_bytes: int) -> bytes:
        parts, size = [], 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > max_bytes:
                raise ApiError(
                    413,
                    f"the body is larger than {max_bytes} bytes, the limit of this proxy: register "
                    "documents one by one and send their ids",
                    code="body_too_large",
                )
            if not message.get("more_body", False):
                return b"".join(parts)

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.begun = True
        await self.deliver({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, body: bytes, *, more: bool) -> None:
        await self.deliver({"type": "http.response.body", "body": body, "more_body": more})

    async def deliver(self, message: Message) -> None:
        """Send a part of the response. Raises ClientGone if the client does not read it."""
        await send_within(STALL_SECONDS, self.send, message)

    async def gone(self) -> None:
        """Return when the client disconnects."""
        while (await self.receive())["type"] != "http.disconnect":
            pass


@dataclass(eq=False)
class ProxyApp:
    """Answers clients by a `Forwarder`.

    ``limits`` count the requests of every key. The counts of a key without running requests are
    kept only if a replica has accepted it, since invented keys have no bound."""

    forwarder: Forwarder
    limits: KeyLimits
    max_body: int
    log: Any
    opening: Any = None
    closing: Any = None
    _accepted: "OrderedDict[str, None]" = field(default_factory=OrderedDict)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, _Client(receive, send))

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        if self.opening is not None:
            await self.opening()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if self.closing is not None:
            await self.closing()
        await send({"type": "lifespan.shutdown.complete"})

    async def _serve(self, scope: Scope, client: _Client) -> None:
        metrics = self.forwarder.metrics
        with metrics.running.track_inprogress():
            try:
                await self._answer(scope, client)
            except ClientGone:
                if not client.begun:
                    metrics.responses.labels("499").inc()
            except ApiError as error:
                metrics.responses.labels(str(error.status_code)).inc()
                if client.begun:
                    raise
                with suppress(ClientGone):
                    await error.response(scope["path"])(scope, client.receive, client.deliver)

    async def _answer(self, scope: Scope, client: _Client) -> None:
        begin = time.perf_counter()
        if scope["path"] in _OWN:
            await self._own(scope["path"], client)
            return
        headers = Headers(scope=scope)
        _check_host(scope, headers)
        content = await client.read(self.max_body)
        # a client that disconnects ends its call to the replica
        gone = asyncio.create_task(client.gone())
        work = asyncio.create_task(self._forward(scope, headers, content, client, begin))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for task in (gone, work):
                task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await asyncio.gather(gone, work, return_exceptions=True)

    async def _forward(
        self, scope: Scope, headers: Headers, content: bytes, client: _Client, begin: float
    ) -> None:
        call = _call(scope, headers, content)
        name = hashlib.blake2b(call.key.encode("utf-8", "replace"), digest_size=16).hexdigest()
        try:
            with self.limits.hold(name):
                answer = await self._ask(call, headers)
                # the paths of documentation need no key, and most errors precede its check
                if call.key and answer.status < 400 and call.route.startswith("/v1/"):
                    self._accept(name)
                await self._reply(call, answer, client, begin)
        finally:
            if call.key and name not in self._accepted:
                self.limits.forget(name)

    def _accept(self, name: str) -> None:
        """Keep the counts of a key, and drop those of the key that is unused for longest."""
        self._accepted[name] = None
        self._accepted.move_to_end(name)
        if len(self._accepted) > _MAX_KEYS:
            self.limits.forget(self._accepted.popitem(last=False)[0])

    async def _ask(self, call: Call, headers: Headers) -> Answer:
        body = _json(call.body)
        if call.route == DOCUMENTS_PATH or call.route.startswith(f"{DOCUMENTS_PATH}/"):
            return await answer_documents(call, body, self.forwarder)
        affinity = affinity_of(body, headers.get(_SESSION_HEADER) or _response_of(call.route))
        return await self.forwarder.forward(call, affinity)

    async def _reply(self, call: Call, answer: Answer, client: _Client, begin: float) -> None:
        metrics = self.forwarder.metrics
        metrics.first_byte.observe(time.perf_counter() - begin)
        metrics.responses.labels(str(answer.status)).inc()
        try:
            await self._relay(call, answer, client)
        finally:
            await answer.close()

    async def _relay(self, call: Call, answer: Answer, client: _Client) -> None:
        """Send an answer to the client; a stream as it grows."""
        kept = [(n.lower().encode("latin-1"), v.encode("latin-1")) for n, v in answer.headers]
        if answer.rest is None:
            if call.method != "HEAD":
                kept.append((b"content-length", str(len(answer.first)).encode()))
            await client.begin(answer.status, kept)
            await client.write(answer.first, more=False)
            return
        await client.begin(answer.status, kept)
        await client.write(answer.first, more=True)
        try:
            async for chunk in answer.rest:
                await client.write(chunk, more=True)
        except ReplicaLost as error:
            self.forwarder.metrics.cut.inc()
            self.log.warning("stream_cut", replica=answer.replica, reason=str(error))
            await client.write(_cut_event(call.route), more=False)
            return
        await client.write(b"", more=False)

    async def _own(self, path: str, client: _Client) -> None:
        """The proxy's own health and metrics; it is ready with at least one replica."""
        metrics, replicas = self.forwarder.metrics, len(self.forwarder.fleet.everyone())
        if path == "/metrics":
            status, kind, content = 200, metrics.content_type, metrics.render()
        else:
            well = replicas > 0 or path == "/health"
            status, kind = (200 if well else 503), "application/json"
            state = {"status": "ready" if replicas else "no_replica", "replicas": replicas}
            content = json.dumps(state).encode()
        length = str(len(content)).encode()
        await client.begin(status, [(b"content-type", kind.encode()), (b"content-length", length)])
        await client.write(content, more=False)


def _call(scope: Scope, headers: Headers, content: bytes) -> Call:
    path = scope.get("raw_path") or scope["path"].encode()
    query = scope.get("query_string", b"")
    target = path.decode("latin-1") + (f"?{query.decode('latin-1')}" if query else "")
    key = headers.get("authorization", "") or headers.get("x-api-key", "")
    return Call(scope["method"], target, headers.items(), content, key)


def _json(content: bytes) -> Any:
    """The JSON value of a body, None for other bodies, which the replica refuses."""
    try:
        return json.loads(content) if content else None
    except (ValueError, RecursionError):
        return None


def _check_host(scope: Scope, headers: Headers) -> None:
    """Refuse a caller of another machine that names this one: servers without keys answer to it."""
    peer = scope.get("client")
    if peer and not is_loopback(peer[0]) and is_loopback(host_name(headers.get("host", ""))):
        raise ApiError(
            403,
            "the header Host names the proxy's own machine: send the proxy's address",
            param="Host",
            code="wrong_host",
        )


def _response_of(route: str) -> str | None:
    """The stored response that a path names."""
    prefix, _, rest = route.partition("/v1/responses/")
    return rest.partition("/")[0] if rest and not prefix else None


def _cut_event(route: str) -> bytes:
    """The last event of a stream whose replica was lost, in the form of its API.

    It begins with an empty line, since the stream may have ended within a line."""
    if route == "/v1/messages":
        error: dict[str, Any] = {
            "type": "error",
            "error": {"type": "overloaded_error", "message": CUT},
        }
        return f"\n\nevent: error\ndata: {json.dumps(error)}\n\n".encode()
    if route == "/v1/responses":
        error = {"type": "error", "code": "replica_lost", "message": CUT, "param": None}
        return f"\n\nevent: error\ndata: {json.dumps(error)}\n\n".encode()
    detail = {"message": CUT, "type": "server_error", "param": None, "code": "replica_lost"}
    return f"\n\ndata: {json.dumps({'error': detail})}\n\n".encode()

"""The outermost ASGI layer: request ids, keys, rate limits, body limits and the access log.

It checks the key before it reads a body. Every fault is answered with an error."""

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from looseleaf.server.client_pace import BODY_SECONDS, STALL_SECONDS, send_within
from looseleaf.server.errors import ApiError, ClientGone, fault, is_messages_path
from looseleaf.server.keys import OPEN_CALLER, Caller, host_name, is_loopback
from looseleaf.server.service import Service

OPEN_PATHS = ("/", "/health", "/ready", "/docs", "/openapi.json", "/favicon.ico")
"""Paths without a key; they reveal no tenant's data."""

OPERATOR_PATHS = ("/metrics", "/v1/holdings")
"""Paths for the operator's key; they cover all tenants."""

_IDS, _MESSAGES_IDS = (b"x-request-id",), (b"x-request-id", b"request-id")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHOWN_ID = re.compile(r"[!-~]{1,256}")
LINGER_SECONDS, LINGER_BYTES = 10.0, 2**26
"""Limits for reading the rest of a refused body."""


@dataclass(eq=False)
class _Exchange:
    """One request and its response; ``is_last`` says whether to close the connection after it.

    ``request_id`` is unique. ``shown_id`` is the client's own id, if it gave one; the response has
    it as ``id_headers``."""

    request_id: str
    shown_id: str
    receive: Receive
    send: Send
    max_body: int
    is_last: Callable[[], bool]
    id_headers: Sequence[bytes]
    status: int = 0
    size: int = 0
    complete: bool = False
    disconnected: bool = False
    due: float = field(default_factory=lambda: asyncio.get_running_loop().time() + BODY_SECONDS)

    async def read(self) -> Message:
        """The next piece of the body. Raises ApiError for a body above its size or time limit."""
        if self.complete:
            return self._note_disconnect(await self.receive())
        try:
            async with asyncio.timeout_at(self.due):
                message = self._note_disconnect(await self.receive())
        except TimeoutError as error:
            raise ApiError(
                408, "the body did not arrive: send it again", code="slow_body"
            ) from error
        if message["type"] == "http.disconnect":
            self.complete = True
            return message
        self.size += len(message.get("body", b""))
        self.complete = not message.get("more_body", False)
        if self.size > self.max_body:
            raise too_large(self.max_body)
        return message

    async def discard_body(self) -> None:
        """Read the rest of a refused body, within limits.

        Closing a connection with unread data resets it, and the client would lose the error."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while not self.complete and self.size <= LINGER_BYTES:
                    message = await self.receive()
                    self.size += len(message.get("body", b""))
                    self.complete = not message.get("more_body", False)

    async def write(self, message: Message) -> None:
        """Send a piece of the response. Raises ClientGone if the client does not read it."""
        if self.disconnected:
            # the framework answers disconnected clients too; that response does not count
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [
                *message.get("headers", ()),
                *((name, self.shown_id.encode()) for name in self.id_headers),
                (b"x-content-type-options", b"nosniff"),
            ]
            if self.is_last():
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        try:
            await send_within(STALL_SECONDS, self.send, message)
        except ClientGone:
            self.disconnected = True
            raise

    def _note_disconnect(self, message: Message) -> Message:
        self.disconnected = self.disconnected or message["type"] == "http.disconnect"
        return message


def too_large(max_body: int) -> ApiError:
    """A 413 that states the limit."""
    return ApiError(
        413,
        f"the body is larger than {max_body} bytes, the limit of this server: register documents "
        "one by one and send their ids",
        code="body_too_large",
    )


class Gate:
    """Wraps an ASGI application; ``routes`` name the requests that it refuses in metrics."""

    def __init__(self, app: ASGIApp, service: Service, routes: Sequence[BaseRoute] = ()) -> None:
        self._app, self._service, self._routes = app, service, routes
        self._max_body = service.max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        service = self._service
        request_id, shown_id = _request_ids(headers)
        exchange = _Exchange(
            request_id,
            shown_id,
            receive,
            send,
            self._max_body,
            lambda: service.draining,
            _MESSAGES_IDS if is_messages_path(scope["path"]) else _IDS,
        )
        facts: dict[str, Any] = {}
        start = time.perf_counter()
        with ExitStack() as stack:
            metrics = self._service.metrics
            stack.enter_context(metrics.under_way.track_inprogress())
            stack.enter_context(self._service.track_request())
            span = self._service.tracer.span(f"{scope['method']} {scope['path']}", headers)
            trace = stack.enter_context(span)
            scope.setdefault("state", {}).update(request_id=exchange.request_id, facts=facts)
            try:
                await self._admit(scope, headers, exchange, facts)
            except ClientGone:
                exchange.disconnected = facts["gone"] = True
            except ApiError as error:
                facts["code"] = error.code
                await self._refuse(error, scope, exchange)
            except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                # a panic of a Rust library is not an Exception
                metrics.faults.inc()
                self._service.log.error("fault", request_id=exchange.request_id, exc_info=error)
                facts["code"] = "internal_error"
                await self._refuse(fault(exchange.request_id), scope, exchange)
            if exchange.disconnected and not exchange.status:
                exchange.status, facts["gone"] = 499, True
            if "gone" in facts:
                metrics.disconnects.inc()
            route = self._route(scope)
            metrics.responses.labels(route, str(exchange.status)).inc()
            trace.set(request_id=exchange.request_id, status=exchange.status, **facts)
        self._service.log.log(
            10 if scope["path"] in OPEN_PATHS or route in OPERATOR_PATHS else 20,
            "request",
            request_id=exchange.request_id,
            method=scope["method"],
            path=scope["path"],
            status=exchange.status,
            seconds=round(time.perf_counter() - start, 4),
            **facts,
        )

    async def _admit(
        self, scope: Scope, headers: Headers, exchange: _Exchange, facts: dict[str, Any]
    ) -> None:
        self._check_host(headers)
        _check_framing(headers)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_body:
            raise too_large(self._max_body)
        caller = self._caller(scope["path"], headers)
        scope["state"]["caller"] = caller
        if caller.tenant:
            facts["tenant"] = caller.tenant
        if _needs_no_key(scope["path"]) or scope["path"] in OPERATOR_PATHS:
            await self._app(scope, exchange.read, exchange.write)
            return
        with self._service.limits.hold(caller.key):
            await self._app(scope, exchange.read, exchange.write)

    def _caller(self, path: str, headers: Headers) -> Caller:
        config = self._service.config
        if _needs_no_key(path) or (path == "/metrics" and config.open_metrics):
            return OPEN_CALLER
        caller = self._service.keys.find(headers.get("authorization"), headers.get("x-api-key"))
        if path in OPERATOR_PATHS and caller.tenant not in ("", config.operator):
            raise ApiError(
                403,
                f"{path} covers all tenants: use a key of {config.operator!r}",
                code="not_the_operator",
            )
        return caller

    def _check_host(self, headers: Headers) -> None:
        """Refuse other host names on a server without keys, against DNS rebinding by web pages."""
        if not self._service.keys.is_open:
            return
        name = host_name(headers.get("host", ""))
        if not is_loopback(name) and name not in map(str.lower, self._service.config.allowed_hosts):
            raise ApiError(
                403,
                "a server without API keys answers only to localhost: give it keys, or name this "
                "host in --allowed-hosts",
                code="wrong_host",
            )

    def _route(self, scope: Scope) -> str:
        """The path of the requested route, also for requests refused before routing."""
        route = scope.get("route")
        if route is None:
            matches = (r for r in self._routes if r.matches(scope)[0] is not Match.NONE)
            route = next(matches, None)
        return getattr(route, "path", "other")

    async def _refuse(self, error: ApiError, scope: Scope, exchange: _Exchange) -> None:
        if exchange.status:
            # a response that has begun can only be aborted
            raise error
        response = error.response(scope["path"])
        if exchange.complete:
            await response(scope, exchange.receive, exchange.write)
            return
        response.headers["connection"] = "close"

        async def write_open(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "more_body": True}
            await exchange.write(message)

        await response(scope, exchange.receive, write_open)
        if error.code != "slow_body":
            await exchange.discard_body()
        await exchange.write({"type": "http.response.body", "body": b""})


def _check_framing(headers: Headers) -> None:
    """Raises ApiError (400) for a request that states its length twice. h11 takes the second
    statement and drops the first; a proxy before the server may do the opposite, and then both
    disagree on where the next request begins."""
    if "transfer-encoding" in headers and "content-length" in headers:
        raise ApiError(
            400,
            "a request has Content-Length or Transfer-Encoding, not both: drop one of them",
            code="ambiguous_length",
        )


def _needs_no_key(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith("/static/")


def _request_ids(headers: Headers) -> tuple[str, str]:
    """A unique id, and the id for the response: as the client gave it, or the same."""
    client_id = headers.get("x-request-id", "")
    unique = uuid.uuid4().hex
    # clients may repeat an id, but ids in the engine must be unique
    request_id = f"{client_id}-{unique[:8]}" if _REQUEST_ID.fullmatch(client_id) else unique
    return request_id, client_id if _SHOWN_ID.fullmatch(client_id) else request_id

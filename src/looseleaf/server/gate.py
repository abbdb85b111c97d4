"""The outermost layer: request ids, keys, limits, the size of bodies, and the line in the log.

Nothing is read from a caller without a key, and no fault leaves a request without an answer."""

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

from looseleaf.server.errors import ApiError, ClientGone, fault
from looseleaf.server.keys import OPEN_CALLER, Caller, is_loopback
from looseleaf.server.service import Service

OPEN_PATHS = ("/", "/health", "/ready", "/docs", "/openapi.json", "/favicon.ico")
"""What needs no key: it says nothing about anybody's data."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
BODY_SECONDS = 60.0
"""In which a body must have arrived as a whole."""

STALL_SECONDS = 60.0
"""How long a piece of a response waits for a caller that does not read."""

LINGER_SECONDS, LINGER_BYTES = 10.0, 2**26
"""How much longer a body is read, and how much of it in all, after it was refused."""


@dataclass(eq=False)
class _Passage:
    """One request on its way through the gate, and what came back. ``is_last`` says whether the
    connection takes no other behind it."""

    request_id: str
    receive: Receive
    send: Send
    most: int
    is_last: Callable[[], bool]
    status: int = 0
    size: int = 0
    complete: bool = False
    gone: bool = False
    due: float = field(default_factory=lambda: asyncio.get_running_loop().time() + BODY_SECONDS)

    async def read(self) -> Message:
        """The next piece of the body; raises ApiError for one that is too long or too slow."""
        if self.complete:
            return self._noted(await self.receive())
        try:
            async with asyncio.timeout_at(self.due):
                message = self._noted(await self.receive())
        except TimeoutError as error:
            raise ApiError(
                408, "the body did not arrive: send it again", code="slow_body"
            ) from error
        if message["type"] == "http.disconnect":
            self.complete = True
            return message
        self.size += len(message.get("body", b""))
        self.complete = not message.get("more_body", False)
        if self.size > self.most:
            raise too_large(self.most)
        return message

    async def read_away(self) -> None:
        """Read the rest of the body, as far as that is short: a connection that is closed with
        something unread is reset, and a caller who looks for the answer only when all is sent would
        never see it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while not self.complete and self.size <= LINGER_BYTES:
                    message = await self.receive()
                    self.size += len(message.get("body", b""))
                    self.complete = not message.get("more_body", False)

    async def write(self, message: Message) -> None:
        """Pass on a piece of the response, with the request's id in its headers; raises ClientGone
        if nobody reads it."""
        if self.gone:
            # what the framework says to a caller that has hung up is no answer of this request
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            identity = (b"x-request-id", self.request_id.encode())
            own = [identity, (b"x-content-type-options", b"nosniff")]
            if self.is_last():
                own.append((b"connection", b"close"))
            message = {**message, "headers": [*message.get("headers", ()), *own]}
        try:
            async with asyncio.timeout(STALL_SECONDS):
                await self.send(message)
        except TimeoutError as error:
            self.gone = True
            raise ClientGone from error

    def _noted(self, message: Message) -> Message:
        self.gone = self.gone or message["type"] == "http.disconnect"
        return message


def too_large(most: int) -> ApiError:
    """A 413 that says how large a body may be."""
    return ApiError(
        413,
        f"the body is larger than {most} bytes, the most that is taken: register documents one by "
        "one and send their ids",
        code="body_too_large",
    )


class Gate:
    """Wraps an ASGI application. What is refused here is counted under that of its ``routes`` which
    was asked for."""

    def __init__(self, app: ASGIApp, service: Service, routes: Sequence[BaseRoute] = ()) -> None:
        self._app, self._service, self._routes = app, service, routes
        self._most = service.max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        service = self._service
        passage = _Passage(
            _request_id(headers), receive, send, self._most, lambda: service.draining
        )
        facts: dict[str, Any] = {}
        start = time.perf_counter()
        with ExitStack() as stack:
            metrics = self._service.metrics
            stack.enter_context(metrics.under_way.track_inprogress())
            stack.enter_context(self._service.passing())
            span = self._service.tracer.span(f"{scope['method']} {scope['path']}", headers)
            trace = stack.enter_context(span)
            scope.setdefault("state", {}).update(request_id=passage.request_id, facts=facts)
            try:
                await self._admit(scope, headers, passage, facts)
            except ClientGone:
                passage.gone = facts["gone"] = True
            except ApiError as error:
                facts["code"] = error.code
                await self._refuse(error, scope, passage)
            except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                # a panic of a Rust library is no Exception
                metrics.faults.inc()
                self._service.log.error("fault", request_id=passage.request_id, exc_info=error)
                facts["code"] = "internal_error"
                await self._refuse(fault(passage.request_id), scope, passage)
            if passage.gone and not passage.status:
                passage.status, facts["gone"] = 499, True
            if "gone" in facts:
                metrics.disconnects.inc()
            route = self._route(scope)
            metrics.responses.labels(route, str(passage.status)).inc()
            trace.set(request_id=passage.request_id, status=passage.status, **facts)
        self._service.log.log(
            10 if scope["path"] in OPEN_PATHS or route == "/metrics" else 20,
            "request",
            request_id=passage.request_id,
            method=scope["method"],
            path=scope["path"],
            status=passage.status,
            seconds=round(time.perf_counter() - start, 4),
            **facts,
        )

    async def _admit(
        self, scope: Scope, headers: Headers, passage: _Passage, facts: dict[str, Any]
    ) -> None:
        self._check_host(headers)
        _check_framing(headers)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._most:
            raise too_large(self._most)
        caller = self._caller(scope["path"], headers)
        scope["state"]["caller"] = caller
        if caller.tenant:
            facts["tenant"] = caller.tenant
        if _needs_no_key(scope["path"]) or scope["path"] == "/metrics":
            await self._app(scope, passage.read, passage.write)
            return
        with self._service.limits.hold(caller.key):
            await self._app(scope, passage.read, passage.write)

    def _caller(self, path: str, headers: Headers) -> Caller:
        config = self._service.config
        if _needs_no_key(path) or (path == "/metrics" and config.open_metrics):
            return OPEN_CALLER
        caller = self._service.keys.find(headers.get("authorization"))
        if path == "/metrics" and caller.tenant not in ("", config.operator):
            raise ApiError(
                403,
                f"metrics tell of all tenants: use a key of {config.operator!r}",
                code="not_the_operator",
            )
        return caller

    def _check_host(self, headers: Headers) -> None:
        """An open server answers only to names of this machine: a page from elsewhere that makes a
        browser call it under a name of its own is refused."""
        if not self._service.keys.is_open:
            return
        host = headers.get("host", "").lower()
        name = (
            host[: host.rindex("]") + 1]
            if host.startswith("[") and "]" in host
            else host.partition(":")[0]
        )
        if not is_loopback(name):
            raise ApiError(
                403,
                "a server without API keys answers only to localhost: give it keys to be reached "
                "by other names",
                code="wrong_host",
            )

    def _route(self, scope: Scope) -> str:
        """The path of the route that was asked for, whether the request came so far or not."""
        found = scope.get("route")
        if found is None:
            matches = (one for one in self._routes if one.matches(scope)[0] is not Match.NONE)
            found = next(matches, None)
        return getattr(found, "path", "other")

    async def _refuse(self, error: ApiError, scope: Scope, passage: _Passage) -> None:
        if passage.status:
            # the response has begun: all that is left is to break it off
            raise error
        response = error.response()
        if passage.complete:
            await response(scope, passage.receive, passage.write)
            return
        response.headers["connection"] = "close"

        async def write_on(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "more_body": True}
            await passage.write(message)

        await response(scope, passage.receive, write_on)
        if error.code != "slow_body":
            await passage.read_away()
        await passage.write({"type": "http.response.body", "body": b""})


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


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    own = uuid.uuid4().hex
    # an id of the caller's is kept for its log, but must not meet another request's in the engine
    return f"{given}-{own[:8]}" if _REQUEST_ID.fullmatch(given) else own

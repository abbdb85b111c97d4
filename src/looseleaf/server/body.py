"""Strict request bodies: UTF-8, unique names, finite numbers, bounded depth and size."""

import json
import math
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute

from looseleaf.server.errors import ApiError
from looseleaf.server.protocol.base import IGNORED
from looseleaf.server.scan import Scan

_MAX_NAMES, _MAX_NAME = 16, 64


def _refuse(reason: str) -> NoReturn:
    raise ApiError(400, f"the body can't be read as JSON: {reason}", code="invalid_json")


def parse_json(content: bytes) -> Any:
    """The value of a JSON text within the limits of `Scan`.

    Raises ApiError (400) for invalid JSON, repeated names, half surrogates, infinite numbers and
    very long integers.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(f"it is not UTF-8 (byte {error.start})")
    try:
        value = json.loads(
            text,
            parse_float=_finite,
            parse_constant=_no_constant,
            object_pairs_hook=_object,
        )
    except json.JSONDecodeError as error:
        _refuse(f"{error.msg} at line {error.lineno}, column {error.colno}")
    except ValueError:
        # Python limits the digits of integers
        _refuse("it has a number that is too long")
    if "\\ud" in text or "\\uD" in text:
        _check_surrogates(value)
    return value


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        _refuse(f"{text[:80]} is too large for a number")
    return value


def _no_constant(name: str) -> NoReturn:
    _refuse(f"{name} is no JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = {}
    for name, item in pairs:
        if name in value:
            _refuse(f"the name {name[:80]!r} is repeated in one object")
        value[name] = item
    return value


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        _refuse("it has half of a surrogate pair, which is no character")


class StrictRequest(Request):
    """A request whose body is limited by `Scan` and parsed by `parse_json`."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            scan = Scan(self.app.state.service.max_values)
            pieces = []
            async for piece in self.stream():
                scan.push(piece)
                pieces.append(piece)
            self._body = b"".join(pieces)
        return self._body

    async def json(self) -> Any:
        return parse_json(await self.body())


def _warning(ignored: list[str]) -> str:
    """One line that names unknown fields, in the characters of a header."""
    names = [ascii(name[:_MAX_NAME])[1:-1] for name in dict.fromkeys(ignored)]
    shown = ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
    return f"unknown fields ignored: {shown}"


class StrictRoute(APIRoute):
    """A route with `StrictRequest` bodies."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            if request.method == "POST":
                kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
                length = request.headers.get("content-length", "")
                if kind != "application/json" and length != "0":
                    raise ApiError(
                        415,
                        "send JSON, with the header Content-Type: application/json",
                        code="unsupported_media_type",
                    )
            warns = request.app.state.service.config.unknown_fields == "warn"
            ignored: list[str] = []
            token = IGNORED.set(ignored if warns else None)
            try:
                response = await handle(StrictRequest(request.scope, request.receive))
            finally:
                IGNORED.reset(token)
            if ignored:
                response.headers["X-Looseleaf-Warning"] = _warning(ignored)
            return response

        return strict

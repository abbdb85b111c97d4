"""Request bodies, read strictly: UTF-8, one value a name, finite numbers, no bottomless nesting."""

import json
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute

from looseleaf.server.errors import ApiError

MAX_DEPTH = 64
"""Arrays and objects inside each other; grammars of deeper schemas are of no use to anybody."""


def _refuse(reason: str) -> NoReturn:
    raise ApiError(400, f"the body can't be read as JSON: {reason}", code="invalid_json")


def parse_json(content: bytes) -> Any:
    """The value of a JSON text; raises ApiError (400) for what JSON does not allow, and for what it
    allows but nobody means."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(f"it is not UTF-8 (byte {error.start})")
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        _refuse(f"{error.msg} at line {error.lineno}, column {error.colno}")
    except RecursionError:
        _refuse(f"it is nested deeper than {MAX_DEPTH} levels")
    except ValueError:
        # Python reads integers of a few thousand digits only
        _refuse("it has a number that is too long")
    _check_depth(value)
    if "\\ud" in text.lower():
        _check_surrogates(value)
    return value


def _no_constant(name: str) -> NoReturn:
    _refuse(f"{name} is no JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = {}
    for name, one in pairs:
        if name in value:
            _refuse(f"the name {name[:80]!r} stands twice in one object")
        value[name] = one
    return value


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    if level:
        _refuse(f"it is nested deeper than {MAX_DEPTH} levels")


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        _refuse("it has half of a surrogate pair, which is no character")


class StrictRequest(Request):
    """A request whose JSON is read by `parse_json`."""

    async def json(self) -> Any:
        return parse_json(await self.body())


class StrictRoute(APIRoute):
    """A route that hands its endpoint a `StrictRequest`."""

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
            return await handle(StrictRequest(request.scope, request.receive))

        return strict

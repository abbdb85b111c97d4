"""Limits of JSON schemas that are checked at once, before any grammar is compiled."""

import json
from collections.abc import Iterator
from typing import Any

from looseleaf.config import ServerConfig
from looseleaf.sampling_params import Grammar
from looseleaf.server.errors import ApiError

_WHERE = "response_format"


def require_small(grammar: Grammar | None, config: ServerConfig) -> None:
    """Raises ApiError (400) for a schema with more bytes, properties or levels than the server
    takes."""
    if grammar is None or grammar.kind != "json_schema":
        return
    size, most = len(grammar.source.encode()), config.max_schema_bytes
    if size > most:
        raise _too_large(f"{size} bytes, but {most} are the most: shorten it")
    schema = json.loads(grammar.source)
    depth, most = max((depth for depth, _ in _walk(schema)), default=0), config.max_schema_depth
    if depth > most:
        raise _too_large(f"{depth} levels, but {most} are the most: nest its objects less deeply")
    number, most = _num_properties(schema), config.max_schema_properties
    if number > most:
        raise _too_large(f"{number} properties, but {most} are the most: leave some out")


def _walk(schema: Any) -> Iterator[tuple[int, Any]]:
    """The objects and lists in ``schema``, each with its depth, without recursion."""
    left = [(1, schema)]
    while left:
        depth, value = left.pop()
        if not isinstance(value, dict | list):
            continue
        yield depth, value
        inner = value.values() if isinstance(value, dict) else value
        left += [(depth + 1, one) for one in inner]


def _num_properties(schema: Any) -> int:
    return sum(
        len(value[name])
        for _, value in _walk(schema)
        if isinstance(value, dict)
        for name in ("properties", "patternProperties")
        if isinstance(value.get(name), dict)
    )


def _too_large(words: str) -> ApiError:
    return ApiError(400, f"the JSON schema has {words}", param=_WHERE, code="schema_too_large")

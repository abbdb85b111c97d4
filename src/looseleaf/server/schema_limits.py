"""Size limits of JSON schemas, checked before their grammar is compiled."""

import json
from collections.abc import Iterator
from typing import Any

from looseleaf.config import ServerConfig
from looseleaf.engine.sampling.call_blocks import CallBlock
from looseleaf.sampling_params import Grammar
from looseleaf.server.errors import ApiError

_WHERE = "response_format"


def require_small(grammar: Grammar | None, config: ServerConfig) -> None:
    """Raises ApiError (400) for a grammar above the limit of bytes, and for JSON schemas above a
    limit of levels or properties."""
    if grammar is None:
        return
    size, limit = len(grammar.source.encode("utf-8", "replace")), config.max_schema_bytes
    if size > limit:
        raise _too_large(f"{size} bytes, above the limit of {limit}: shorten it")
    if grammar.kind == "json_schema":
        schema = json.loads(grammar.source)
    elif grammar.kind == "calls":
        schema = [
            json.loads(item.schema or "") for item in CallBlock.read(grammar.source).schemas()
        ]
    else:
        return
    depth, limit = max((depth for depth, _ in _walk(schema)), default=0), config.max_schema_depth
    if depth > limit:
        raise _too_large(
            f"{depth} levels, above the limit of {limit}: nest its objects less deeply"
        )
    number, limit = _num_properties(schema), config.max_schema_properties
    if number > limit:
        raise _too_large(f"{number} properties, above the limit of {limit}: remove properties")


def _walk(schema: Any) -> Iterator[tuple[int, Any]]:
    """The depth and value of every object and list in ``schema``, without recursion."""
    stack = [(1, schema)]
    while stack:
        depth, value = stack.pop()
        if not isinstance(value, dict | list):
            continue
        yield depth, value
        inner = value.values() if isinstance(value, dict) else value
        stack += [(depth + 1, item) for item in inner]


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

"""Calls that a request forces: their grammar, and the parser of the text that follows it.

The text is a JSON list of calls, in the keys of the Hermes form. It serves families whose own form
has no grammar."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from looseleaf.sampling_params import Grammar
from looseleaf.server.errors import ApiError
from looseleaf.server.protocol.tools import FunctionDefinition
from looseleaf.server.tools.base import Opening, ToolParser
from looseleaf.server.tools.bodies import JsonBody

MAX_CALLS = 64
"""Most calls of one answer that is forced to call."""


class ForcedParser(ToolParser):
    """The parser of an answer that is a JSON list of calls."""

    name = "forced"

    @classmethod
    def writes(cls, template: str) -> bool:
        return False

    def openings(self) -> Sequence[Opening]:
        return [Opening("[", lambda _: JsonBody(), anchored=True, kept=True)]


def forced_calls(functions: Sequence[FunctionDefinition], *, parallel: bool) -> Grammar:
    """The grammar of a list of calls of ``functions``, one call unless ``parallel``.

    Raises ApiError for a schema that is nested too deep."""
    try:
        items = [
            _call(function, f"#/items/anyOf/{number}/properties/arguments")
            for number, function in enumerate(functions)
        ]
        most = MAX_CALLS if parallel else 1
        schema = {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": items}}
        return Grammar("json_schema", json.dumps(schema, allow_nan=False), strict=True)
    except RecursionError as error:
        raise ApiError(
            400,
            "tools: a schema of arguments is nested too deep: simplify it",
            param="tools",
            code="invalid_value",
        ) from error


def _call(function: FunctionDefinition, place: str) -> dict[str, Any]:
    arguments = _moved({"type": "object", **(function.parameters or {})}, place)
    arguments.pop("$schema", None)
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """``schema`` with its references to itself pointing below ``place``."""
    if isinstance(schema, Mapping):
        return {
            key: place + value.removeprefix("#")
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, place)
            for key, value in schema.items()
        }
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    return schema

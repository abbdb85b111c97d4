"""GLM 4.5: a name, then ``<arg_key>`` and ``<arg_value>`` tags, inside ``<tool_call>``."""

import json
import re
from collections.abc import Sequence
from typing import Any

from looseleaf.server.tools.base import Opening, ToolParser
from looseleaf.server.tools.bodies import NAME, TaggedBody, as_call, beginning_of
from looseleaf.server.tools.events import Call

_PAIR = re.compile(
    r"\s*<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>", re.DOTALL
)
_HEAD = re.compile(rf"\s*(?P<name>{NAME})\s*")
_AFTER_NAME = f"{beginning_of('<arg_key>')}|{beginning_of('</tool_call>')}"
_BEGINNING = rf"\s*+(?:{NAME}\s*+(?:{_AFTER_NAME}))?"


class GlmParser(ToolParser):
    """Values of string parameters are raw text, other values are JSON."""

    name = "glm"

    @classmethod
    def writes(cls, template: str) -> bool:
        return "<arg_key>" in template

    def openings(self) -> Sequence[Opening]:
        return [
            Opening("<tool_call>", lambda _: TaggedBody("</tool_call>", self._read, _BEGINNING))
        ]

    def _read(self, text: str) -> Sequence[Call]:
        head = _HEAD.match(text)
        if head is None:
            return ()
        name, at = head["name"], head.end()
        arguments: dict[str, Any] = {}
        while (pair := _PAIR.match(text, at)) is not None:
            key = pair["key"].strip()
            arguments[key] = self._value(name, key, pair["value"])
            at = pair.end()
        if text[at:].strip():
            return ()
        try:
            return [as_call(name, arguments)]
        except ValueError:
            # JSON has no infinite numbers
            return ()

    def _value(self, name: str, key: str, text: str) -> Any:
        properties = self.schemas.get(name, {}).get("properties", {})
        schema = properties.get(key) if isinstance(properties, dict) else None
        if isinstance(schema, dict) and schema.get("type") == "string":
            return text
        try:
            return json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return text


def _no_constant(name: str) -> None:
    raise ValueError(name)

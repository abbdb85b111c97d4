"""Granite 3: ``<|tool_call|>`` or ``<tool_call>`` before a JSON list of calls."""

from collections.abc import Sequence

from looseleaf.server.tools.base import Opening, ToolParser
from looseleaf.server.tools.bodies import JsonBody


class GraniteParser(ToolParser):
    """A marker without an end, then a list."""

    name = "granite"

    @classmethod
    def writes(cls, template: str) -> bool:
        return "<|tool_call|>" in template and "<|/tool_call|>" not in template

    def openings(self) -> Sequence[Opening]:
        return [Opening(m, lambda parser: JsonBody()) for m in ("<|tool_call|>", "<tool_call>")]

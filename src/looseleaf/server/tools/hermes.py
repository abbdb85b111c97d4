"""Hermes, Qwen 2.5, Qwen 3 and Granite 4: ``<tool_call>{"name", "arguments"}</tool_call>``."""

from collections.abc import Sequence

from looseleaf.server.tools.base import Opening, ToolParser
from looseleaf.server.tools.bodies import JsonBody


class HermesParser(ToolParser):
    """One tagged JSON object for each call."""

    name = "hermes"

    @classmethod
    def writes(cls, template: str) -> bool:
        return "<tool_call>" in template and "</tool_call>" in template

    def openings(self) -> Sequence[Opening]:
        return [Opening("<tool_call>", lambda parser: JsonBody("</tool_call>", lists=False))]

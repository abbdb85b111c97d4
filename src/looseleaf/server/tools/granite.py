"""Granite 3: ``<|tool_call|>`` or ``<tool_call>`` before a JSON list of calls."""

from collections.abc import Sequence

from looseleaf.engine.sampling.call_blocks import CallBlock
from looseleaf.server.tools.base import Opening, ToolParser
from looseleaf.server.tools.bodies import JsonBody
from looseleaf.server.tools.forms import Signature, json_calls


class GraniteParser(ToolParser):
    """A marker without an end, then a list."""

    name = "granite"

    @classmethod
    def writes(cls, template: str) -> bool:
        return "<|tool_call|>" in template and "<|/tool_call|>" not in template

    @classmethod
    def block(cls, signatures: Sequence[Signature], template: str, most: int = 1) -> CallBlock:
        calls, marker = json_calls(signatures), "<|tool_call|>"
        return CallBlock(calls, f"{marker}[", ", ", "]", most, trigger=marker)

    def openings(self) -> Sequence[Opening]:
        return [Opening(m, lambda parser: JsonBody()) for m in ("<|tool_call|>", "<tool_call>")]

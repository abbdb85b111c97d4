"""Phi 4: a JSON list of calls, after ``functools`` or between ``<|tool_call|>`` tags."""

from collections.abc import Sequence

from looseleaf.engine.sampling.call_blocks import CallBlock
from looseleaf.server.tools.base import Opening, ToolParser
from looseleaf.server.tools.bodies import JsonBody
from looseleaf.server.tools.forms import Signature, json_calls


class PhiParser(ToolParser):
    """The word counts at the begin of an answer, the tag anywhere."""

    name = "phi"

    @classmethod
    def writes(cls, template: str) -> bool:
        return "<|/tool_call|>" in template or "<|tool|>" in template or "functools[" in template

    @classmethod
    def block(cls, signatures: Sequence[Signature], template: str, most: int = 1) -> CallBlock:
        calls, word = json_calls(signatures), "functools["
        if word in template:
            return CallBlock(calls, word, ", ", "]", most, trigger=word, anchored=True)
        begin, end = "<|tool_call|>", "<|/tool_call|>"
        return CallBlock(calls, f"{begin}[", ", ", f"]{end}", most, trigger=begin)

    def openings(self) -> Sequence[Opening]:
        return [
            Opening("<|tool_call|>", lambda parser: JsonBody("<|/tool_call|>")),
            Opening("functools", lambda parser: JsonBody(), anchored=True),
        ]

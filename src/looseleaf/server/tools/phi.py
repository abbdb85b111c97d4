"""Phi 4: a JSON list of calls, after ``functools`` or between ``<|tool_call|>`` tags."""

from collections.abc import Sequence

from looseleaf.server.tools.base import Opening, ToolParser
from looseleaf.server.tools.bodies import JsonBody


class PhiParser(ToolParser):
    """The word counts at the begin of an answer, the tag anywhere."""

    name = "phi"

    @classmethod
    def writes(cls, template: str) -> bool:
        return "<|/tool_call|>" in template or "<|tool|>" in template or "functools[" in template

    def openings(self) -> Sequence[Opening]:
        return [
            Opening("<|tool_call|>", lambda parser: JsonBody("<|/tool_call|>")),
            Opening("functools", lambda parser: JsonBody(), anchored=True),
        ]

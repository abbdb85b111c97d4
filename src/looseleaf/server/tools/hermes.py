"""Hermes, Qwen 2.5, Qwen 3 and Granite 4: ``<tool_call>{"name", "arguments"}</tool_call>``.

Qwen2.5-Coder has Hermes's template, but writes the object without tags, or in a block of Markdown.
"""

from collections.abc import Collection, Sequence

from looseleaf.engine.sampling.call_blocks import CallBlock
from looseleaf.server.tools.base import Opening, ToolParser
from looseleaf.server.tools.bodies import JsonBody
from looseleaf.server.tools.events import Call
from looseleaf.server.tools.forms import Signature, json_calls


class UntaggedBody(JsonBody):
    """An object that names one of ``tools`` and has the fields of a call only."""

    def __init__(self, tools: Collection[str], close: str = "") -> None:
        super().__init__(close, lists=False)
        self._tools = tools

    def calls(self) -> Sequence[Call]:
        fields = [members.spans.keys() for members in self._reader.objects]
        calls = super().calls()
        is_call = all(names == {"name", "arguments"} for names in fields)
        return calls if is_call and all(call.name in self._tools for call in calls) else []

    def begun(self) -> Sequence[Call]:
        # a further field may follow
        return ()


class HermesParser(ToolParser):
    """One JSON object for each call, in tags, in a block, or at the begin of an answer."""

    name = "hermes"

    @classmethod
    def writes(cls, template: str) -> bool:
        return "<tool_call>" in template and "</tool_call>" in template

    @classmethod
    def block(cls, signatures: Sequence[Signature], template: str, most: int = 1) -> CallBlock:
        calls = json_calls(signatures, before="<tool_call>\n", after="\n</tool_call>")
        return CallBlock(calls, between="\n", most=most, trigger="<tool_call>")

    def openings(self) -> Sequence[Opening]:
        return [
            Opening("<tool_call>", lambda parser: JsonBody("</tool_call>", lists=False)),
            Opening("```json\n", lambda parser: UntaggedBody(parser.schemas, "```")),
            Opening("{", lambda parser: UntaggedBody(parser.schemas), anchored=True, kept=True),
        ]

"""Llama 3: JSON objects with ``name`` and ``parameters``, alone or after ``<|python_tag|>``."""

from collections.abc import Sequence

from looseleaf.engine.sampling.call_blocks import CallBlock
from looseleaf.server.tools.base import Opening, ToolParser
from looseleaf.server.tools.bodies import JsonBody
from looseleaf.server.tools.forms import Signature, json_calls


class LlamaParser(ToolParser):
    """Calls at the begin of an answer, separated by semicolons."""

    name = "llama3_json"
    blanks = " \t\r\n;"

    @classmethod
    def writes(cls, template: str) -> bool:
        return '"parameters": ' in template and "<|start_header_id|>" in template

    @classmethod
    def block(cls, signatures: Sequence[Signature], template: str, most: int = 1) -> CallBlock:
        calls = json_calls(signatures, key="parameters")
        trigger = '{"name": '
        return CallBlock(calls, between="; ", most=most, trigger=trigger, anchored=True)

    def openings(self) -> Sequence[Opening]:
        return [
            Opening("<|python_tag|>", lambda parser: JsonBody(lists=False)),
            Opening("{", lambda parser: JsonBody(lists=False), anchored=True, kept=True),
        ]

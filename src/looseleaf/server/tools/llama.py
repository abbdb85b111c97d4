"""Llama 3: JSON objects with ``name`` and ``parameters``, alone or after ``<|python_tag|>``."""

from collections.abc import Sequence

from looseleaf.server.tools.base import Opening, ToolParser
from looseleaf.server.tools.bodies import JsonBody


class LlamaParser(ToolParser):
    """Calls at the begin of an answer, separated by semicolons."""

    name = "llama3_json"
    blanks = " \t\r\n;"

    @classmethod
    def writes(cls, template: str) -> bool:
        return '"parameters": ' in template and "<|start_header_id|>" in template

    def openings(self) -> Sequence[Opening]:
        return [
            Opening("<|python_tag|>", lambda parser: JsonBody(lists=False)),
            Opening("{", lambda parser: JsonBody(lists=False), anchored=True, kept=True),
        ]

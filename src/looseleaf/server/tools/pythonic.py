"""Llama 3.2, Llama 4 and others: a list of Python calls, ``[get_weather(city="Oslo")]``."""

import ast
import re
from collections.abc import Sequence
from typing import Any

from looseleaf.server.tools.base import Body, Opening, ToolParser
from looseleaf.server.tools.bodies import NAME, as_call, close_end
from looseleaf.server.tools.events import Call

_HEAD = re.compile(rf"\[\s*{NAME}\s*\(")
_HALF_HEAD = re.compile(r"\[\s*(?:[A-Za-z_][\w.-]{0,255}\s*)?")
_TOKEN = re.compile(
    r"""[^\[\](){}"']++|'(?:[^'\\\n]|\\[^\n])*+'|"(?:[^"\\\n]|\\[^\n])*+"|[\[\](){}]"""
)
_PAIRS = {"]": "[", ")": "(", "}": "{"}
_MAX_CHARACTERS = 1 << 18
_MAX_DEPTH = 64
_JSON_WORDS = {"true": True, "false": False, "null": None}


class PythonicBody(Body):
    """A bracketed list of calls with keyword arguments, then ``close`` if given."""

    def __init__(self, close: str = "") -> None:
        self._close = close
        self._list_end = 0
        self._at = 0
        self._stack: list[str] = []

    def feed(self, text: str) -> None:
        self.text += text
        if not _HEAD.match(self.text):
            if not _HALF_HEAD.fullmatch(self.text):
                self.status = "broken"
            return
        while self.status == "open" and not self._list_end and self._step():
            pass
        self._read_close(is_last=False)

    def finish(self) -> None:
        self._read_close(is_last=True)
        if self.status == "open":
            self.status = "broken"

    def _read_close(self, *, is_last: bool) -> None:
        if self.status == "open" and self._list_end:
            end = close_end(self.text, self._list_end, self._close, is_last=is_last)
            if end is not None:
                self.status, self.end = "complete", end

    def _step(self) -> bool:
        match = _TOKEN.match(self.text, self._at)
        if match is None:
            is_long = len(self.text) > _MAX_CHARACTERS
            # a string without its end, or one that a line break cuts
            if is_long or (self._at < len(self.text) and "\n" in self.text[self._at :]):
                self.status = "broken"
            return False
        self._at = match.end()
        token = match[0]
        if token in ("[", "(", "{"):
            self._stack.append(token)
        elif token in _PAIRS:
            if not self._stack or self._stack.pop() != _PAIRS[token]:
                self.status = "broken"
            elif not self._stack:
                self._list_end = self._at
        if len(self._stack) > _MAX_DEPTH or self._at > _MAX_CHARACTERS:
            self.status = "broken"
        return self.status == "open"

    def calls(self) -> Sequence[Call]:
        return read_calls(self.text[: self._list_end])


class PythonicParser(ToolParser):
    """A list of calls at the begin of an answer, or between ``<|python_start|>`` tags."""

    name = "pythonic"

    @classmethod
    def writes(cls, template: str) -> bool:
        return "<|python_start|>" in template or "[func_name1(" in template

    def openings(self) -> Sequence[Opening]:
        return [
            Opening("<|python_start|>", lambda parser: PythonicBody("<|python_end|>")),
            Opening("[", lambda parser: PythonicBody(), anchored=True, kept=True),
        ]


def read_calls(text: str) -> list[Call]:
    """The calls of a Python list or of one Python call; empty if it has another form."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_read_call(node) for node in nodes]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _read_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("a call has keyword arguments only")
    arguments = {keyword.arg: _value(keyword.value) for keyword in node.keywords}
    if None in arguments:
        raise ValueError("a call has no dictionary of arguments")
    return as_call(ast.unparse(node.func), {str(key): arguments[key] for key in arguments})


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _JSON_WORDS:
        return _JSON_WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key) for key in node.keys if key is not None]
        values = [_value(value) for value in node.values]
        return {str(key): value for key, value in zip(keys, values, strict=True)}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("JSON has no such value")
    return value

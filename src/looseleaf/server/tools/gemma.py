"""Gemma: ``call:name{key:value}`` between function tags, and Gemma 3's ``tool_code`` fence."""

import re
from collections.abc import Sequence
from typing import Any

from looseleaf.server.tools.base import Opening, ToolParser
from looseleaf.server.tools.bodies import NAME, TaggedBody, as_call, beginning_of
from looseleaf.server.tools.events import Call
from looseleaf.server.tools.pythonic import read_calls

_HEAD = re.compile(rf"\s*call:(?P<name>{NAME})(?=\{{)")
_BEGINNING = r"\s*+" + beginning_of("call:", f"(?:{NAME}{beginning_of('{')})?")
_KEY = re.compile(r"\s*(?P<key>[^\s:,{}\[\]]+)\s*:\s*")
_SCALAR = re.compile(r"[^,{}\[\]]+")
_NUMBER = re.compile(r"-?\d{1,300}(\.\d{1,300})?([eE][-+]?\d{1,3})?", re.ASCII)
_WORDS = {"true": True, "false": False, "null": None, "None": None}
_MAX_DEPTH = 64


class GemmaParser(ToolParser):
    """FunctionGemma's tags with ``<escape>``, Gemma 4's tags with ``<|"|>``, and Python calls."""

    name = "gemma"

    @classmethod
    def writes(cls, template: str) -> bool:
        return "<start_function_call>" in template or "<|tool_call>" in template

    def openings(self) -> Sequence[Opening]:
        def tagged(close: str, quote: str) -> TaggedBody:
            return TaggedBody(close, lambda text: _read(text, quote), _BEGINNING)

        return [
            Opening("<start_function_call>", lambda _: tagged("<end_function_call>", "<escape>")),
            Opening("<|tool_call>", lambda _: tagged("<tool_call|>", '<|"|>')),
            Opening("```tool_code\n", lambda _: TaggedBody("```", read_calls)),
        ]


def _read(text: str, quote: str) -> Sequence[Call]:
    head = _HEAD.match(text)
    if head is None:
        return ()
    reader = _Reader(text.rstrip(), head.end(), quote)
    try:
        call = as_call(head["name"], reader.value(0))
    except ValueError:
        return ()
    return [call] if reader.at == len(reader.text) else ()


class _Reader:
    """Reads objects with bare keys, lists, quoted strings and bare scalars."""

    def __init__(self, text: str, at: int, quote: str) -> None:
        self.text, self.at, self._quote = text, at, quote

    def value(self, depth: int) -> Any:
        """The value at the current place. Raises ValueError."""
        if depth > _MAX_DEPTH:
            raise ValueError("too many levels")
        if self._skip("{"):
            return self._members(depth)
        if self._skip("["):
            return self._items(depth)
        if self._skip(self._quote):
            end = self.text.index(self._quote, self.at)
            text, self.at = self.text[self.at : end], end + len(self._quote)
            return text
        match = _SCALAR.match(self.text, self.at)
        if match is None:
            raise ValueError("a value is missing")
        self.at = match.end()
        return _scalar(match[0].strip())

    def _members(self, depth: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        while not self._skip("}"):
            if members and not self._skip(","):
                raise ValueError("a comma is missing")
            match = _KEY.match(self.text, self.at)
            if match is None:
                raise ValueError("a key is missing")
            self.at = match.end()
            members[match["key"]] = self.value(depth + 1)
        return members

    def _items(self, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self._skip("]"):
            if items and not self._skip(","):
                raise ValueError("a comma is missing")
            items.append(self.value(depth + 1))
        return items

    def _skip(self, text: str) -> bool:
        start = self.at
        while start < len(self.text) and self.text[start].isspace():
            start += 1
        if not self.text.startswith(text, start):
            return False
        self.at = start + len(text)
        return True


def _scalar(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if _NUMBER.fullmatch(text):
        return float(text) if set(text) & set(".eE") else int(text)
    return text

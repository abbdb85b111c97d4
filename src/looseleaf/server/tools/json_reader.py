"""An incremental reader of one JSON value: its end, and the members of its call objects.

A value is valid or broken at every character, so an answer is never held for a value that can no
longer end. The reader keeps its position: each character is read once.
"""

import re
from dataclasses import dataclass, field
from typing import Literal

_BLANK = re.compile(r"[ \t\n\r]*")
_STRING = re.compile(r'(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+')
_HALF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_SCALAR = re.compile(r"[-+.\w]*")
_VALID_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null", re.ASCII)
_MAX_DEPTH = 128
_MAX_SCALAR = 512

Status = Literal["open", "complete", "broken"]
Span = tuple[int, int | None]
"""The begin of a value in the text, and its end if it has one."""


@dataclass
class Members:
    """The spans of an object's values, by key."""

    start: int
    spans: dict[str, Span] = field(default_factory=dict)


class JsonReader:
    """Reads ``text``, to which `feed` appends.

    ``end`` is the end of a complete value, or of the valid part of a broken value.

    ``objects`` are the members of the outer object, or of all objects in an outer list."""

    def __init__(self) -> None:
        self.text = ""
        self.status: Status = "open"
        self.end = 0
        self.objects: list[Members] = []
        self._at = 0
        self._stack: list[str] = []
        # the next part: value, first (value or ]), key, first_key (key or }), colon, comma
        self._expects = "value"
        self._keys: list[str] = []
        self._string_start: int | None = None
        self._is_key = False

    def feed(self, text: str) -> Status:
        """Append ``text`` and read on."""
        self.text += text
        while self.status == "open" and self._step():
            pass
        return self.status

    @property
    def valid(self) -> int:
        """Characters that are known to be valid."""
        return self._at

    def _step(self) -> bool:
        """Read one token; False if the text must grow first."""
        if self._string_start is not None:
            return self._read_string()
        self._at = _blank_end(self.text, self._at)
        if self._at == len(self.text):
            return False
        character = self.text[self._at]
        if self._expects in ("value", "first"):
            return self._read_value(character)
        if self._expects in ("key", "first_key"):
            if character == '"':
                return self._begin_string(is_key=True)
            return self._close("}", character, allowed=self._expects == "first_key")
        if self._expects == "colon":
            if character != ":":
                return self._break()
            self._at += 1
            self._expects = "value"
            return True
        if character == ",":
            self._at += 1
            self._expects = "key" if self._stack[-1] == "{" else "value"
            return True
        return self._close("}" if self._stack[-1] == "{" else "]", character, allowed=True)

    def _read_value(self, character: str) -> bool:
        if character == "]":
            return self._close("]", character, allowed=self._expects == "first")
        start = self._at
        if character in "{[":
            if len(self._stack) == _MAX_DEPTH:
                return self._break()
            self._note_start(start)
            self._stack.append(character)
            self._keys.append("")
            if character == "{" and self._is_call_level():
                self.objects.append(Members(start))
            self._at += 1
            self._expects = "first_key" if character == "{" else "first"
            return True
        if character == '"':
            self._note_start(start)
            return self._begin_string(is_key=False)
        return self._read_scalar(start)

    def _read_scalar(self, start: int) -> bool:
        match = _SCALAR.match(self.text, start)
        end = start if match is None else match.end()
        if end == start or end - start > _MAX_SCALAR:
            return self._break()
        if end == len(self.text):
            # the next piece may continue the number or the word
            return False
        if not _VALID_SCALAR.fullmatch(self.text, start, end):
            return self._break()
        self._note_start(start)
        self._at = end
        return self._end_value()

    def _begin_string(self, *, is_key: bool) -> bool:
        self._string_start, self._is_key = self._at, is_key
        self._at += 1
        return True

    def _read_string(self) -> bool:
        match = _STRING.match(self.text, self._at)
        self._at = self._at if match is None else match.end()
        if self._at == len(self.text):
            return False
        if self.text[self._at] != '"':
            return False if _HALF_ESCAPE.match(self.text, self._at) else self._break()
        self._at += 1
        start, self._string_start = self._string_start or 0, None
        if not self._is_key:
            return self._end_value()
        self._keys[-1] = self.text[start + 1 : self._at - 1]
        if self._in_call() and self._keys[-1] in self.objects[-1].spans:
            # a repeated name would change a value that is already known
            return self._break()
        self._expects = "colon"
        return True

    def _close(self, closing: str, character: str, *, allowed: bool) -> bool:
        opening = "{" if closing == "}" else "["
        if not allowed or character != closing or not self._stack or self._stack[-1] != opening:
            return self._break()
        self._at += 1
        self._stack.pop()
        self._keys.pop()
        return self._end_value()

    def _end_value(self) -> bool:
        if self._in_call():
            members, key = self.objects[-1], self._keys[-1]
            members.spans[key] = (members.spans[key][0], self._at)
        if not self._stack:
            self.status, self.end = "complete", self._at
            return False
        self._expects = "comma"
        return True

    def _note_start(self, start: int) -> None:
        if self._in_call():
            self.objects[-1].spans[self._keys[-1]] = (start, None)

    def _is_call_level(self) -> bool:
        return self._stack in (["{"], ["[", "{"])

    def _in_call(self) -> bool:
        return self._is_call_level() and bool(self.objects)

    def _break(self) -> bool:
        self.status, self.end = "broken", self._at
        return False


def _blank_end(text: str, start: int) -> int:
    match = _BLANK.match(text, start)
    return start if match is None else match.end()

"""Forms of calls that families share: JSON objects with a name, JSON behind a name, and tags."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from looseleaf.server.tools.base import Body
from looseleaf.server.tools.events import Call
from looseleaf.server.tools.json_reader import JsonReader, Members

_ARGUMENTS = ("arguments", "parameters")
_BLANK = " \t\r\n"
NAME = r"[A-Za-z_][\w.-]{0,255}"
"""A tool's name, as a regular expression."""

ANY = r"(?s:.*)"
"""Any text, as a regular expression."""

_WRITTEN_NAME = re.compile(r"[\w.:/-]{1,256}")


def close_end(text: str, end: int, close: str, *, is_last: bool) -> int | None:
    """The end of ``text[:end]`` with the tag ``close`` after it, if it is there.

    None if the tag may still come."""
    if not close:
        return end
    rest = text[end:].lstrip(_BLANK)
    if rest.startswith(close):
        return len(text) - len(rest) + len(close)
    return end if is_last or not close.startswith(rest) else None


def beginning_of(literal: str, rest: str = ANY) -> str:
    """A regular expression of ``literal`` with ``rest`` after it, and of every part of it.

    A part is a beginning, or nothing."""
    pattern = rest
    for character in reversed(literal):
        pattern = f"(?:{re.escape(character)}{pattern})?"
    return pattern


class JsonBody(Body):
    """An object ``{"name": ..., "arguments": {...}}`` or a list of them, then ``close`` if given.

    A missing ``close`` is accepted. ``parameters`` is another name of the arguments."""

    def __init__(self, close: str = "", *, lists: bool = True) -> None:
        self._reader = JsonReader()
        self._close = close
        self._starts = ("{", "[") if lists else ("{",)

    def feed(self, text: str) -> None:
        self.text += text
        first = self.text.lstrip(_BLANK)[:1]
        if first and first not in self._starts:
            self.status, self.end = "broken", 0
            return
        self._reader.feed(text)
        if self._reader.status == "broken":
            self.status, self.end = "broken", self._reader.end
        elif self._reader.status == "complete":
            self._read_close(is_last=False)

    def finish(self) -> None:
        if self._reader.status == "complete":
            self._read_close(is_last=True)
        else:
            self.status, self.end = "broken", len(self.text)

    def _read_close(self, *, is_last: bool) -> None:
        end = close_end(self.text, self._reader.end, self._close, is_last=is_last)
        if end is not None:
            self.status, self.end = "complete", end

    def calls(self) -> Sequence[Call]:
        calls = [self._call(members) for members in self._reader.objects]
        return [] if None in calls else [call for call in calls if call is not None]

    def begun(self) -> Sequence[Call]:
        calls = []
        for members in self._reader.objects:
            call = self._call(members)
            if call is None:
                break
            calls.append(call)
        return calls

    def _call(self, members: Members) -> Call | None:
        """The call of an object, with its arguments so far; None if its form is another."""
        name = members.spans.get("name")
        if name is None or name[1] is None:
            return None
        value = json.loads(self.text[name[0] : name[1]])
        if not isinstance(value, str) or not _WRITTEN_NAME.fullmatch(value):
            return None
        key = next((key for key in members.spans if key in _ARGUMENTS), None)
        if key is None:
            # the arguments may follow
            return Call(value, "{}") if self._reader.status == "complete" else None
        start, end = members.spans[key]
        if self.text[start] == "{":
            stop = min(self._reader.valid, len(self.text)) if end is None else end
            return Call(value, self.text[start:stop])
        return None if end is None else _written_call(value, self.text[start:end])


def _written_call(name: str, arguments: str) -> Call | None:
    """A call whose arguments are null, or an object that is written as a string."""
    value = json.loads(arguments)
    if value is None:
        return Call(name, "{}")
    return Call(name, value) if isinstance(value, str) and is_object(value) else None


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def is_object(text: str) -> bool:
    """Whether ``text`` is one JSON object."""
    reader = JsonReader()
    reader.feed(text)
    blank = reader.text[reader.end :].strip(_BLANK) == ""
    whole = reader.status == "complete" and blank and _is_unicode(text)
    return whole and text.lstrip(_BLANK).startswith("{")


class NamedJsonBody(Body):
    """A name in the form ``head``, then a JSON object of arguments, then ``close`` if given.

    ``head`` matches with the name as its group ``name``; ``beginning`` matches every part of a
    head from its begin to the end of the text."""

    def __init__(self, head: str, beginning: str, close: str = "") -> None:
        self._head, self._beginning = re.compile(head), re.compile(beginning)
        self._name: str | None = None
        self._start = 0
        self._reader = JsonReader()
        self._close = close

    def feed(self, text: str) -> None:
        self.text += text
        if self._name is None:
            match = self._head.match(self.text)
            if match is None:
                if not self._beginning.fullmatch(self.text):
                    self.status, self.end = "broken", 0
                return
            self._name, self._start = match["name"], match.end()
            text = self.text[self._start :]
        self._reader.feed(text)
        first = self._reader.text.lstrip(_BLANK)[:1]
        if self._reader.status == "broken" or first not in ("", "{"):
            self.status, self.end = "broken", self._start + self._reader.end
        elif self._reader.status == "complete":
            self._read_close(is_last=False)

    def finish(self) -> None:
        if self._reader.status == "complete":
            self._read_close(is_last=True)
        else:
            self.status, self.end = "broken", len(self.text)

    def _read_close(self, *, is_last: bool) -> None:
        start = self._start + self._reader.end
        end = close_end(self.text, start, self._close, is_last=is_last)
        if end is not None:
            self.status, self.end = "complete", end

    def calls(self) -> Sequence[Call]:
        return self.begun()

    def begun(self) -> Sequence[Call]:
        text = self._reader.text
        start = len(text) - len(text.lstrip(_BLANK))
        if self._name is None or text[start : start + 1] != "{":
            return []
        complete = self._reader.status == "complete"
        stop = self._reader.end if complete else self._reader.valid
        return [Call(self._name, text[start:stop])]


class TaggedBody(Body):
    """Text up to the first ``close``, which ``read`` turns into calls.

    ``beginning`` matches the text as long as it may still be a call, with the ``close`` and any
    text after it; so other text is not held."""

    def __init__(
        self, close: str, read: Callable[[str], Sequence[Call]], beginning: str = ANY
    ) -> None:
        self._close, self._read = close, read
        self._beginning = re.compile(beginning)
        self._searched = 0

    def feed(self, text: str) -> None:
        self.text += text
        if not self._beginning.fullmatch(self.text):
            self.status = "broken"
            return
        at = self.text.find(self._close, self._searched)
        if at >= 0:
            self.status, self.end = "complete", at + len(self._close)
        self._searched = max(0, len(self.text) - len(self._close) + 1)

    def finish(self) -> None:
        self.status, self.end = "broken", len(self.text)

    def calls(self) -> Sequence[Call]:
        return self._read(self.text[: self.end - len(self._close)])


def as_call(name: str, arguments: dict[str, Any]) -> Call:
    """A call whose arguments are written as JSON. Raises ValueError for an infinite number."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return Call(name, text if _is_unicode(text) else json.dumps(arguments))

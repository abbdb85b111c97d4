"""Server-sent events as bytes: JSON objects, and prepared frames for events of text alone."""

import json
from collections.abc import Callable
from json.encoder import encode_basestring
from typing import Any

Event = dict[str, Any] | bytes
"""A JSON object, or the bytes of an event."""

DONE = b"data: [DONE]\n\n"
"""The end of a stream of chat or completion chunks."""

# clients may split a stream at these line ends, as Python's splitlines does
_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})

# no field of an answer has this text
_PLACE = "\0text\0"


def line(event: Event) -> bytes:
    """The bytes of one event."""
    if isinstance(event, bytes):
        return event
    text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text.translate(_LINE_ENDS)}\n\n".encode("utf-8", "replace")


def named(event: dict[str, Any]) -> bytes:
    """The bytes of an event whose name is its type."""
    return b"event: " + str(event["type"]).encode() + b"\n" + line(event)


class Frame:
    """The bytes around the text of an event; ``make`` returns the whole event of a text.

    Events of one stream differ in their text only, so the rest is encoded once."""

    def __init__(self, make: Callable[[str], dict[str, Any]]) -> None:
        place = encode_basestring(_PLACE).encode()
        self._head, _, self._tail = line(make(_PLACE)).partition(place)

    def event(self, text: str) -> bytes:
        """The bytes of the event of ``text``."""
        quoted = encode_basestring(text)
        if not quoted.isascii():
            quoted = quoted.translate(_LINE_ENDS)
        return self._head + quoted.encode("utf-8", "replace") + self._tail

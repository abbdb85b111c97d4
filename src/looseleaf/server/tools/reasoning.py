"""Splitters of thoughts and content: ``<think>`` tags, and harmony's analysis channel.

The laws of `ToolParser` hold here too: the cutting of a text into pieces changes no event, and
reasoning, content and markup in their order are the text.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator

from looseleaf.server.tools.events import Content, Event, Markup, Reasoning

_BLANK = " \t\r\n"
_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


class Splitter(ABC):
    """Reads one answer."""

    def __init__(self) -> None:
        self._pending = ""

    def feed(self, text: str) -> list[Event]:
        """The events of the next piece."""
        self._pending += text
        return [*self._advance(is_last=False)]

    def finish(self) -> list[Event]:
        """The events of the text that was held back; the answer has ended."""
        return [*self._advance(is_last=True)]

    @abstractmethod
    def _advance(self, *, is_last: bool) -> Iterator[Event]:
        """The events of the pending text."""

    def _take(self, length: int) -> str:
        text, self._pending = self._pending[:length], self._pending[length:]
        return text


class TagSplitter(Splitter):
    """Thoughts between tags at the begin of an answer.

    ``opened`` says that the prompt ends with the opening tag. Without an end tag the whole answer
    is a thought. Blanks beside the tags are markup."""

    def __init__(self, opening: str, closing: str, *, opened: bool) -> None:
        super().__init__()
        self._opening, self._closing = opening, closing
        self._opened = opened
        self._state = "start"

    def _advance(self, *, is_last: bool) -> Iterator[Event]:
        if self._state == "start" and not (yield from self._begin(is_last)):
            return
        if self._state == "thought" and not (yield from self._think(is_last)):
            return
        if self._state == "closed":
            yield from self._skip_blanks()
            self._state = "content" if self._pending else "closed"
        if self._state == "content" and self._pending:
            yield Content(self._take(len(self._pending)))

    def _begin(self, is_last: bool) -> Generator[Event, None, bool]:
        rest = self._pending.lstrip(_BLANK)
        if rest.startswith(self._opening):
            yield Markup(self._take(len(self._pending) - len(rest) + len(self._opening)))
        elif not is_last and self._opening.startswith(rest):
            return False
        elif not self._opened:
            self._state = "content"
            return True
        yield from self._skip_blanks()
        if not self._pending and not is_last:
            # more blanks may follow
            self._opening, self._opened = "", True
            return False
        self._state = "thought"
        return True

    def _think(self, is_last: bool) -> Generator[Event, None, bool]:
        at = self._pending.find(self._closing)
        if at >= 0:
            thought = self._pending[:at].rstrip(_BLANK)
            if thought:
                yield Reasoning(self._take(len(thought)))
            yield Markup(self._take(at - len(thought) + len(self._closing)))
            self._state = "closed"
            return True
        safe = len(self._pending) if is_last else self._safe_length()
        if safe:
            yield Reasoning(self._take(safe))
        return False

    def _safe_length(self) -> int:
        """Characters before a possible end tag and its blanks."""
        text = self._pending
        first = max(0, len(text) - len(self._closing))
        tails = (at for at in range(first, len(text)) if self._closing.startswith(text[at:]))
        return len(text[: next(tails, len(text))].rstrip(_BLANK))

    def _skip_blanks(self) -> Iterator[Event]:
        blanks = len(self._pending) - len(self._pending.lstrip(_BLANK))
        if blanks:
            yield Markup(self._take(blanks))


_CALL = re.compile(r"\bto=")
_MESSAGE = "<|message|>"
_STARTS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_MAX_HEADER = 1024


class HarmonySplitter(Splitter):
    """Harmony's messages: analysis is reasoning, calls stay in the text, the rest is content."""

    def __init__(self) -> None:
        super().__init__()
        self._kind: type[Content] | type[Reasoning] = Content
        self._in_call = False

    def _advance(self, *, is_last: bool) -> Iterator[Event]:
        while self._pending:
            at, literal = self._next_literal()
            if at:
                length = at if literal or is_last else self._safe_length()
                if not length:
                    return
                yield self._kind(self._take(length))
            elif literal in _ENDS:
                text = self._take(len(literal))
                yield Content(text) if self._in_call else Markup(text)
                self._kind, self._in_call = Content, False
            elif not (yield from self._read_header(is_last)):
                return

    def _read_header(self, is_last: bool) -> Generator[Event, None, bool]:
        end = self._pending.find(_MESSAGE)
        if end < 0 and not is_last and len(self._pending) <= _MAX_HEADER:
            return False
        header = self._pending[:end] if 0 <= end <= _MAX_HEADER else ""
        if not header:
            # a start without a message is text
            self._kind = Content
            yield Content(self._take(1))
            return True
        text = self._take(end + len(_MESSAGE))
        self._in_call = bool(_CALL.search(header))
        is_thought = "<|channel|>analysis" in header and not self._in_call
        self._kind = Reasoning if is_thought else Content
        yield Content(text) if self._in_call else Markup(text)
        return True

    def _next_literal(self) -> tuple[int, str]:
        """The place of the next tag and the tag, else the length of the pending text."""
        places = [(self._pending.find(tag), tag) for tag in (*_STARTS, *_ENDS)]
        return min(((at, tag) for at, tag in places if at >= 0), default=(len(self._pending), ""))

    def _safe_length(self) -> int:
        text = self._pending
        for at in range(max(0, len(text) - len("<|channel|>")), len(text)):
            if any(tag.startswith(text[at:]) for tag in (*_STARTS, *_ENDS)):
                return at
        return len(text)


def choose_splitter(template: str, prompt: str) -> Splitter | None:
    """The splitter of a chat template; ``prompt`` is the end of the prompt's text.

    None if the template knows no thoughts."""
    if "<|channel|>" in template and _MESSAGE in template:
        return HarmonySplitter()
    for opening, closing in _TAGS:
        if closing in template:
            return TagSplitter(opening, closing, opened=prompt.rstrip(_BLANK).endswith(opening))
    return None


def thought_tags(template: str) -> list[str]:
    """The tags of thoughts that a chat template knows."""
    if "<|channel|>" in template and _MESSAGE in template:
        return [*_STARTS, *_ENDS, _MESSAGE]
    return [tag for pair in _TAGS for tag in pair if pair[1] in template]

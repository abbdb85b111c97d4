"""The base of all tool parsers: content up to a marker, then calls in the family's form.

Two laws hold for every text and every cutting into pieces: the pieces give the events of the whole
text, and content and markup in their order are the text. A form that is no call is content.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from looseleaf.engine.sampling.call_blocks import CallBlock
from looseleaf.server.tools.events import (
    Call,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Markup,
    Parsed,
    collect,
)
from looseleaf.server.tools.forms import Signature
from looseleaf.server.tools.json_reader import Status


class Body(ABC):
    """The text after an opening marker, read piece by piece.

    ``end`` is the length of a complete body, or of the valid part of a broken body."""

    status: Status = "open"
    end: int = 0
    text: str = ""

    @abstractmethod
    def feed(self, text: str) -> None:
        """Append ``text``, and set ``status`` and ``end``."""

    @abstractmethod
    def finish(self) -> None:
        """The answer has ended: set ``status`` to complete or broken, and ``end``."""

    @abstractmethod
    def calls(self) -> Sequence[Call]:
        """The calls of a complete body; empty if it has another form."""

    def begun(self) -> Sequence[Call]:
        """The calls whose names are known, with their arguments so far."""
        return ()


@dataclass(frozen=True)
class Opening:
    """A marker, and the form of the calls after it.

    ``anchored`` markers count at the begin of an answer and directly after a call only. ``kept``
    markers are also the first characters of the body."""

    marker: str
    body: Callable[["ToolParser"], Body]
    anchored: bool = False
    kept: bool = False


_PIECE = 1024
"""Characters of a text that a parser reads at a time. An open block doubles them."""
_MAX_READINGS = 16
"""Most blocks of one marker that may fail around a text. Deeper markers are content."""


@dataclass
class _Block:
    """An opened block of calls; ``marker`` and ``taken`` are its raw text."""

    opening: Opening
    marker: str
    body: Body
    taken: str
    sent: list[int] = field(default_factory=list)
    """Characters of arguments that events have, by call."""


class ToolParser(ABC):
    """Reads one answer. ``schemas`` has the parameters of each tool, by name.

    ``eager`` sends arguments before a call is complete. Use it for answers that follow a grammar:
    a call that breaks keeps the pieces that were sent."""

    name: ClassVar[str]
    blanks: ClassVar[str] = " \t\r\n"
    """Characters between calls that are no content."""

    def __init__(
        self, schemas: Mapping[str, Mapping[str, Any]] | None = None, *, eager: bool = False
    ) -> None:
        self.schemas = schemas or {}
        self._eager = eager
        self._openings = tuple(self.openings())
        self._fed = 0
        # of the last piece, the characters from ``_at`` on are unread
        self._piece, self._at = "", 0
        self._pending = ""
        self._held = ""
        self._at_boundary = True
        self._block: _Block | None = None
        self._failed: dict[str, list[int]] = {}
        self._calls = 0

    @classmethod
    @abstractmethod
    def writes(cls, template: str) -> bool:
        """Whether a chat template with this source writes calls in this form."""

    @abstractmethod
    def openings(self) -> Sequence[Opening]:
        """The markers that open calls."""

    @classmethod
    def block(
        cls, signatures: Sequence[Signature], template: str, most: int = 1
    ) -> CallBlock | None:
        """A block of up to ``most`` calls as the template writes it, with its trigger.

        None for a form without a grammar."""
        return None

    @classmethod
    def parse(cls, text: str, schemas: Mapping[str, Mapping[str, Any]] | None = None) -> Parsed:
        """The content and the calls of a complete answer."""
        parser = cls(schemas)
        return collect([*parser.feed(text), *parser.finish()])

    def feed(self, text: str) -> list[Event]:
        """The events of the next piece."""
        self._fed += len(text)
        self._piece, self._at = text, 0
        return [*self._advance(is_last=False)]

    def finish(self) -> list[Event]:
        """The events of the text that was held back; the answer has ended."""
        events = [*self._advance(is_last=True)]
        if self._held:
            after_calls = self._calls and self._at_boundary
            events.append(Markup(self._held) if after_calls else Content(self._held))
            self._held = ""
        return events

    def _advance(self, *, is_last: bool) -> Iterator[Event]:
        is_growing = True
        while is_growing or self._at < len(self._piece):
            self._read_on()
            ends = is_last and self._at == len(self._piece)
            if self._block is None:
                is_growing = bool(self._pending) and (yield from self._read_content(ends))
            elif self._pending or ends:
                is_growing = yield from self._read_block(ends)
            else:
                is_growing = False

    def _read_on(self) -> None:
        """Move unread characters to the pending text: a bounded number, or as many as a block has.

        So a marker costs the text near it, and not the rest of the answer."""
        if len(self._pending) < _PIECE:
            size = _PIECE if self._block is None else max(_PIECE, len(self._block.taken))
            piece = self._piece[self._at : self._at + size]
            self._pending += piece
            self._at += len(piece)

    def _read_again(self, length: int, text: str) -> None:
        """Make the last ``length`` characters of ``text`` unread; it has all text up to here."""
        self._pending = ""
        if length <= self._at:
            self._at -= length
        else:
            self._piece = text[len(text) - length :] + self._piece[self._at :]
            self._at = 0

    @property
    def _position(self) -> int:
        """The place of the pending text in the answer."""
        return self._fed - (len(self._piece) - self._at) - len(self._pending)

    def _read_content(self, is_last: bool) -> Generator[Event, None, bool]:
        """Send content up to the next marker; False if the text must grow first."""
        if self._at_boundary:
            rest = self._pending.lstrip(self.blanks)
            self._held += self._pending[: len(self._pending) - len(rest)]
            self._pending = rest
            if not rest:
                return False
        at, opening = self._next_opening()
        if opening is not None and at == 0:
            if not self._fails(opening):
                self._open(opening)
                return True
            at = len(opening.marker)
        safe = at if is_last or opening is not None else self._safe_length()
        if safe == 0:
            return False
        yield Content(self._held + self._pending[:safe])
        self._held, self._pending, self._at_boundary = "", self._pending[safe:], False
        return True

    def _fails(self, opening: Opening) -> bool:
        """Whether the most blocks of ``opening`` have failed around the pending text."""
        ends = [end for end in self._failed.get(opening.marker, ()) if end > self._position]
        self._failed[opening.marker] = ends
        return len(ends) >= _MAX_READINGS

    def _next_opening(self) -> tuple[int, Opening | None]:
        """The place and the form of the first marker, else the length of the pending text."""
        best: tuple[int, int, Opening | None] = (len(self._pending), 0, None)
        for opening in self._openings:
            if opening.anchored:
                at = 0 if self._at_boundary and self._pending.startswith(opening.marker) else -1
            else:
                at = self._pending.find(opening.marker)
            if at >= 0:
                best = min(best, (at, -len(opening.marker), opening), key=lambda place: place[:2])
        return best[0], best[2]

    def _safe_length(self) -> int:
        """Characters of the pending text that can belong to no marker."""
        for at in range(max(0, len(self._pending) - self._longest), len(self._pending)):
            tail = self._pending[at:]
            for opening in self._openings:
                possible = not opening.anchored or (at == 0 and self._at_boundary)
                if possible and opening.marker.startswith(tail):
                    return at
        return len(self._pending)

    @property
    def _longest(self) -> int:
        return max(len(opening.marker) for opening in self._openings)

    def _open(self, opening: Opening) -> None:
        length = 0 if opening.kept else len(opening.marker)
        marker, self._pending = self._pending[:length], self._pending[length:]
        self._block = _Block(opening, marker, opening.body(self), "")

    def _read_block(self, is_last: bool) -> Generator[Event, None, bool]:
        """Read the open block; False if the text must grow first."""
        block = self._block
        assert block is not None
        block.body.feed(self._pending)
        block.taken, self._pending = block.taken + self._pending, ""
        if block.body.status == "open" and is_last:
            block.body.finish()
        if self._eager:
            yield from self._send(block, block.body.begun())
        if block.body.status == "open":
            return False
        calls = self._complete_calls(block)
        if not calls and not block.sent:
            yield from self._give_back(block)
            return True
        yield from self._send(block, calls)
        yield from (CallEnd(self._calls + number) for number in range(len(block.sent)))
        end = block.body.end
        yield Markup(self._held + block.marker + block.taken[:end])
        self._calls += len(block.sent)
        self._read_again(len(block.taken) - end, block.taken)
        self._held, self._at_boundary, self._block = "", True, None
        return True

    def _complete_calls(self, block: _Block) -> Sequence[Call]:
        """The calls of a block; none if an answer without a marker names an unknown tool."""
        calls = block.body.calls() if block.body.status == "complete" else ()
        unknown = self.schemas and any(call.name not in self.schemas for call in calls)
        return () if block.opening.anchored and unknown else calls

    def _send(self, block: _Block, calls: Sequence[Call]) -> Iterator[Event]:
        """The pieces of ``calls`` that no event has."""
        for number, call in enumerate(calls):
            index = self._calls + number
            if number == len(block.sent):
                block.sent.append(0)
                yield CallBegin(index, call.name)
            piece = call.arguments[block.sent[number] :]
            if piece:
                block.sent[number] += len(piece)
                yield CallArguments(index, piece)

    def _give_back(self, block: _Block) -> Iterator[Event]:
        """The marker of a block without calls is content; the text after it is read again."""
        end = self._position - len(block.taken) + block.body.end
        self._failed.setdefault(block.opening.marker, []).append(end)
        first = "" if block.marker else block.taken[:1]
        yield Content(self._held + block.marker + first)
        self._read_again(len(block.taken) - len(first), block.taken)
        self._held, self._at_boundary, self._block = "", False, None

"""Reads one answer of a chat: reasoning, then content and calls, as parts of OpenAI's messages."""

import secrets
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from looseleaf.server.tools.base import ToolParser
from looseleaf.server.tools.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Markup,
    Reasoning,
    collect,
)
from looseleaf.server.tools.reasoning import Splitter

Json = dict[str, Any]

_CHARACTERS = string.ascii_letters + string.digits


@dataclass(eq=False)
class AnswerReader:
    """A splitter before a parser; None for a part that the answer does not have.

    ``max_calls`` drops further calls. ``has_calls`` is whether a call has begun."""

    splitter: Splitter | None
    parser: ToolParser | None
    includes_reasoning: bool = True
    max_calls: int | None = None
    has_calls: bool = False

    def feed(self, text: str) -> list[Event]:
        """The events of the next piece."""
        events: list[Event] = [Content(text)] if self.splitter is None else self.splitter.feed(text)
        return [*self._kept(self._parsed(events))]

    def finish(self) -> list[Event]:
        """The events of the text that was held back; the answer has ended."""
        events = [] if self.splitter is None else self.splitter.finish()
        parsed = [*self._parsed(events)]
        if self.parser is not None:
            parsed += self.parser.finish()
        return [*self._kept(parsed)]

    def deltas(self, events: Iterable[Event]) -> list[Json]:
        """The deltas of a stream, in OpenAI's form."""
        return [delta for delta in map(self._delta, events) if delta]

    def message(self, text: str) -> Json:
        """The message of a complete answer, in OpenAI's form."""
        parsed = collect([*self.feed(text), *self.finish()])
        content = None if parsed.calls and not parsed.content else parsed.content
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if parsed.reasoning:
            message |= _reasoning(parsed.reasoning)
        if parsed.calls:
            message["tool_calls"] = [
                {
                    "id": self.new_id(),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in parsed.calls
            ]
        return message

    def _parsed(self, events: Sequence[Event]) -> Iterable[Event]:
        for event in events:
            if self.parser is not None and isinstance(event, Content):
                yield from self.parser.feed(event.text)
            else:
                yield event

    def _kept(self, events: Iterable[Event]) -> Iterable[Event]:
        for event in events:
            if isinstance(event, CallBegin | CallArguments | CallEnd):
                if self.max_calls is not None and event.index >= self.max_calls:
                    continue
                self.has_calls = True
            if isinstance(event, Reasoning) and not self.includes_reasoning:
                continue
            yield event

    def _delta(self, event: Event) -> Json | None:
        if isinstance(event, Content):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            return _reasoning(event.text)
        if isinstance(event, Markup | CallEnd):
            return None
        if isinstance(event, CallBegin):
            function = {"name": event.name, "arguments": ""}
            call = {"index": event.index, "id": self.new_id(), "type": "function"}
            return {"tool_calls": [{**call, "function": function}]}
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}

    def new_id(self) -> str:
        """An id for a call."""
        # Mistral's template accepts ids of nine letters and digits only
        return "".join(secrets.choice(_CHARACTERS) for _ in range(9))


def _reasoning(text: str) -> Json:
    return {"reasoning_content": text, "reasoning": text}

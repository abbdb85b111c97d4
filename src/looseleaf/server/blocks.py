"""The answer to a chat as blocks: thoughts, texts and calls, each opened, extended and closed.

APIs whose answers are lists of blocks translate these events into their own."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from looseleaf.llm.client import Completion, Output
from looseleaf.server import report
from looseleaf.server.errors import ApiError
from looseleaf.server.events import Event, named
from looseleaf.server.generation import Generation
from looseleaf.server.tools.events import CallArguments, CallBegin, Content, Reasoning
from looseleaf.server.tools.events import Event as ReaderEvent
from looseleaf.server.tools.reader import AnswerReader

Json = dict[str, Any]
Kind = Literal["thought", "text", "call"]


@dataclass(eq=False)
class Block:
    """A part of an answer. ``text`` grows; that of a call is the JSON text of its arguments.

    A call has a ``name`` and an id. ``entries`` are log-probabilities of a text, where the request
    has them."""

    index: int
    kind: Kind
    name: str = ""
    call_id: str = ""
    text: str = ""
    is_open: bool = True
    entries: list[report.Entry] = field(default_factory=list)


@dataclass(frozen=True)
class BlockBegin:
    """A block begins, without text."""

    block: Block


@dataclass(frozen=True)
class BlockText:
    """A block gains text."""

    block: Block
    text: str
    entries: tuple[report.Entry, ...] = ()


@dataclass(frozen=True)
class BlockEnd:
    """A block is complete."""

    block: Block


BlockEvent = BlockBegin | BlockText | BlockEnd


@dataclass(eq=False)
class Blocks:
    """The blocks of one answer, in order; at most the last one is open."""

    reader: AnswerReader
    blocks: list[Block] = field(default_factory=list)
    is_complete: bool = False
    _characters: int = 0
    _tokens: int = 0

    def follow(self, output: Completion) -> list[BlockEvent]:
        """The events of the output since the last call; its end closes the last block."""
        if self.is_complete:
            return []
        text = output.text[self._characters :]
        events = self.reader.feed(text) if text else []
        self._characters += len(text)
        self.is_complete = output.finish_reason is not None
        if self.is_complete:
            events += self.reader.finish()
        elif not events:
            # log-probabilities wait for their text
            return []
        entries = tuple((output.logprobs or ())[self._tokens :])
        self._tokens += len(entries)
        translated = [*self._translated(events, entries)]
        return [*translated, *self._close()] if self.is_complete else translated

    @property
    def has_calls(self) -> bool:
        """Whether a block is a call."""
        return any(block.kind == "call" for block in self.blocks)

    def _translated(
        self, events: list[ReaderEvent], entries: tuple[report.Entry, ...]
    ) -> Iterator[BlockEvent]:
        for event in events:
            if isinstance(event, CallBegin):
                yield from self._open("call", event.name)
            elif isinstance(event, CallArguments):
                yield self._extend(event.text)
            elif isinstance(event, Content | Reasoning) and event.text:
                kind: Kind = "text" if isinstance(event, Content) else "thought"
                if not self.blocks or not self.blocks[-1].is_open or self._last.kind != kind:
                    yield from self._open(kind)
                # tokens of an update belong to its first text
                yield self._extend(event.text, entries if kind == "text" else ())
                entries = () if kind == "text" else entries

    @property
    def _last(self) -> Block:
        return self.blocks[-1]

    def _open(self, kind: Kind, name: str = "") -> Iterator[BlockEvent]:
        yield from self._close()
        call_id = self.reader.new_id() if kind == "call" else ""
        block = Block(len(self.blocks), kind, name, call_id)
        self.blocks.append(block)
        yield BlockBegin(block)

    def _extend(self, text: str, entries: tuple[report.Entry, ...] = ()) -> BlockText:
        self._last.text += text
        self._last.entries += entries
        return BlockText(self._last, text, entries)

    def _close(self) -> Iterator[BlockEvent]:
        if self.blocks and self._last.is_open:
            self._last.is_open = False
            yield BlockEnd(self._last)


@runtime_checkable
class BlockForm(Protocol):
    """The JSON of one API. Events have their name as ``type``."""

    def opening(self, request: Output) -> list[Json]:
        """The events before the first block."""

    def events(self, event: BlockEvent) -> list[Json]:
        """The events of a block."""

    async def ending(self, request: Output, blocks: Blocks) -> list[Json]:
        """The events after the last block."""

    async def whole(self, request: Output, blocks: Blocks) -> Json:
        """The complete answer."""

    def failure(self, error: ApiError) -> Json:
        """The last event of a stream that failed."""


@dataclass(eq=False)
class BlockAnswer:
    """The answer to a request with one output, in the form of one API."""

    generation: Generation
    blocks: Blocks
    form: BlockForm
    end = b""

    async def whole(self) -> Json:
        """The complete answer."""
        (request,) = await self.generation.complete()
        self.blocks.follow(request.outputs[0])
        return await self.form.whole(request, self.blocks)

    async def chunks(self) -> AsyncGenerator[list[Event], None]:
        """The answer as a stream of the events of each update."""
        updates = self.generation.updates()
        has_begun = has_ended = False
        async with aclosing(updates):
            async for _, request in updates:
                events = [] if has_begun else self.form.opening(request)
                has_begun = True
                for event in self.blocks.follow(request.outputs[0]):
                    events += self.form.events(event)
                # an output may grow between two updates, so its end may be seen twice
                if self.generation.finished and not has_ended:
                    has_ended = True
                    events += await self.form.ending(request, self.blocks)
                if events:
                    yield [named(event) for event in events]

    def failure(self, error: ApiError) -> list[Event]:
        """The last events of a stream that failed."""
        return [named(self.form.failure(error))]

"""An engine in another process, with the operations of `AsyncLLM` that a server uses."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import count
from typing import Any, ParamSpec, TypeVar

import msgspec

from looseleaf.config import IndexConfig
from looseleaf.engine.documents.entry import DocumentInfo
from looseleaf.engine.documents.holdings import HeldDocuments
from looseleaf.errors import (
    DeadlineExceeded,
    DocumentNotFound,
    EngineClosed,
    EngineFault,
    EngineLost,
)
from looseleaf.llm.client import EngineFacts
from looseleaf.llm.preparation import PromptThreads
from looseleaf.llm.remote.link import Link
from looseleaf.llm.remote.registered_cache import RegisteredCache
from looseleaf.llm.remote.stream import RemoteStream
from looseleaf.llm.remote.wire import (
    Call,
    Cut,
    FromEngine,
    Leave,
    Pulse,
    Reply,
    Step,
    changed_fields,
    ids_from_bytes,
    ids_to_bytes,
    open_message,
    parts_to_wire,
)
from looseleaf.llm.remote.wire_error import error_from_wire
from looseleaf.models.tokenizer.tokenizer import Tokenizer
from looseleaf.prompt.builder import PromptBuilder
from looseleaf.prompt.request import Document, Request, SystemPrompt

P = ParamSpec("P")
T = TypeVar("T")

_GRACE_SECONDS = 2.0
"""Seconds after a deadline in which the engine may report it; then the stream raises by itself."""

_SILENCE_SECONDS = 2.0
"""Seconds without a pulse after which the engine's process counts as busy."""

_LOOKUP_SECONDS = 30.0
"""Time limit for the lookup of a registered document."""

_POLL_SECONDS = 0.05
_LOST = "the engine's process has ended, and the answer is not complete: ask again in a moment"


class RemoteEngine:
    """The engine at the other end of a link. `attach` gives it a link, also after a restart.

    ``on_lost`` is called if the other side ends the link. Without a link ``is_open`` is False, and
    operations raise EngineLost. All methods except `registered` are for the event loop's thread."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        facts: EngineFacts,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.facts, self.tokenizer = facts, tokenizer
        self.prompts = PromptBuilder(tokenizer, facts.vocab_size)
        self.fault: EngineFault | None = None
        self._threads, self._on_lost = PromptThreads(tokenizer), on_lost
        self._loop = asyncio.get_running_loop()
        self._link: Link | None = None
        self._refusing = False
        self._numbers = count()
        self._streams: dict[int, RemoteStream] = {}
        self._calls: dict[int, asyncio.Queue[Reply | Exception]] = {}
        self._documents = RegisteredCache()
        self._pulse, self._pulsed = 0.0, 0.0

    def attach(self, link: socket.socket) -> None:
        """Use the engine at the other end of a socket."""
        if self._link is not None:
            # the new link replaces this one, which is not lost
            on_lost, self._on_lost = self._on_lost, lambda: None
            self._link.close()
            self._on_lost = on_lost
        self._pulse, self._pulsed = 0.0, time.monotonic()
        self._link = Link(link, FromEngine, self._take, self._lose)

    @property
    def is_lost(self) -> bool:
        """Whether the engine's process has ended, and no other has replaced it yet."""
        return self._link is None and self.fault is None and not self._refusing

    @property
    def is_open(self) -> bool:
        """Whether new requests are accepted."""
        return self._link is not None and not self._refusing

    @property
    def busy_seconds(self) -> float:
        """Seconds since the engine's step began; 0.0 while idle."""
        if self._link is None:
            return 0.0
        silent = time.monotonic() - self._pulsed
        is_busy = self._pulse > 0.0 or silent > _SILENCE_SECONDS
        return self._pulse + silent if is_busy else 0.0

    async def stream(self, request: Request) -> AsyncGenerator[RemoteStream, None]:
        """The growing output of a request; leaving the loop aborts it.

        It yields one object, whose properties grow. A deadline holds even if the engine does not
        respond. Raises EngineClosed, EngineLost and the error of the request."""
        link = self._require_link()
        if self._refusing:
            raise EngineClosed("the engine finishes its requests and closes: use another one")
        number, since = next(self._numbers), time.perf_counter()
        stream = RemoteStream(
            request, self.tokenizer, lambda output: link.send(Cut(number, output))
        )
        self._streams[number] = stream
        timer = None
        if request.deadline is not None:
            timer = self._loop.call_later(
                request.deadline + _GRACE_SECONDS, self._expire, stream, request.deadline
            )
        link.send(open_message(request, number, since))
        try:
            while not (stream.finished and stream.is_read):
                await stream.changed()
                yield stream
        finally:
            if timer is not None:
                timer.cancel()
            if self._streams.pop(number, None) is not None and not stream.finished:
                link.send(Leave(number))

    async def prepare(self, salt: str, make: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """The result of ``make``, such as a prompt, from threads that salts share fairly."""
        return await self._threads.make(salt, make, *args, **named)

    async def hold_system_prompt(self, text: str) -> SystemPrompt:
        """Compute a system prompt and keep it in the cache."""
        prompt = await self.prepare("", self.prompts.system_prompt, text)
        await self._ask("hold", None, text=text, tokens=ids_to_bytes(prompt.tokens))
        return prompt

    async def register(
        self,
        document: Document,
        *,
        document_id: str | None = None,
        salt: str = "",
        system_prompt: SystemPrompt | None = None,
        system: str | None = None,
        pinned: bool = False,
        hosted: IndexConfig | None = None,
        most: int | None = None,
    ) -> AsyncGenerator[DocumentInfo, None]:
        """Compute a document in advance and keep it under an id, as `AsyncLLM.register`."""
        self._require_link()
        parts = await self.prepare(
            salt, self.prompts.from_document, document, system_prompt, system
        )
        replies = self._replies(
            "register",
            document={"text": document.text, "name": document.name, "context": document.context},
            parts=msgspec.to_builtins(parts_to_wire(parts), builtin_types=(bytes,)),
            document_id=document_id,
            salt=salt,
            pinned=pinned,
            hosted=None if hosted is None else changed_fields(hosted),
            most=most,
        )
        async with contextlib.aclosing(replies):
            async for value in replies:
                if value is not None:
                    yield msgspec.convert(value, DocumentInfo)

    async def documents(
        self, salt: str = "", *, after: str | None = None, limit: int | None = None
    ) -> list[DocumentInfo]:
        """The registered documents of a salt, oldest first. Raises DocumentNotFound."""
        infos: list[DocumentInfo] = await self._ask(
            "documents", list[DocumentInfo], salt=salt, after=after, limit=limit
        )
        return infos

    async def document(self, document_id: str, salt: str = "") -> DocumentInfo:
        """The state of a registered document. Raises DocumentNotFound."""
        return await self._ask_document("document", document_id, salt)

    async def pin(self, document_id: str, salt: str = "") -> DocumentInfo:
        """Keep a document in the cache. Raises DocumentNotFound."""
        return await self._ask_document("pin", document_id, salt)

    async def unpin(self, document_id: str, salt: str = "") -> DocumentInfo:
        """Allow eviction of a document again. Raises DocumentNotFound."""
        return await self._ask_document("unpin", document_id, salt)

    async def delete(self, document_id: str, salt: str = "") -> DocumentInfo:
        """Delete a document; returns its last state. Raises DocumentNotFound."""
        try:
            return await self._ask_document("delete", document_id, salt)
        finally:
            # after the answer, since a lookup before it may add the document
            self._documents.drop((document_id, salt))

    def registered(self, document_ids: Sequence[str], salt: str = "") -> list[Document]:
        """Registered documents, for use in prompts; not for the event loop's thread.

        The engine confirms every use, so a deleted document is never used. Raises
        DocumentNotFound."""
        lookup = asyncio.run_coroutine_threadsafe(self._find(document_ids, salt), self._loop)
        try:
            return lookup.result(_LOOKUP_SECONDS)
        except TimeoutError as error:
            raise DeadlineExceeded(
                "the engine did not find a document in time: ask again in a while"
            ) from error

    async def holdings(self) -> HeldDocuments:
        """The documents that the engine holds, and its load."""
        summary: HeldDocuments = await self._ask("holdings", HeldDocuments)
        return summary

    async def writes_done(self) -> None:
        """Return after all writes to tiers that are pending now."""
        await self._ask("writes_done", None)

    async def drain(self, timeout: float | None = None, *, patience: float | None = None) -> bool:
        """Refuse new requests, and wait for the end of all others, for at most ``timeout`` seconds.

        The engine's process goes on, so ``patience`` has no effect. Returns whether all requests
        ended by themselves."""
        self._refusing = True
        end = None if timeout is None else time.monotonic() + timeout
        while self._streams and (end is None or time.monotonic() < end):
            await asyncio.sleep(_POLL_SECONDS)
        whole = not self._streams
        self.close()
        return whole

    def close(self, timeout: float | None = None) -> bool:
        """End all requests and the link."""
        self._refusing = True
        self._threads.close()
        self._end_all(EngineClosed("the server has closed: the answer is not complete"))
        if self._link is not None:
            self._link.close()
        return True

    def _require_link(self) -> Link:
        if self._link is None:
            raise EngineLost(_LOST)
        return self._link

    def _expire(self, stream: RemoteStream, limit: float) -> None:
        stream.fail(
            DeadlineExceeded(
                "the engine does not respond, and the request did not end within its deadline of "
                f"{limit} s: try another server, or try again later"
            )
        )

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Step):
            streams = self._streams
            for delta in message.deltas:
                if (stream := streams.get(delta.number)) is not None:
                    stream.take(delta)
            for report in message.reports:
                if (stream := streams.get(report.number)) is not None:
                    stream.report(report)
        elif isinstance(message, Pulse):
            self._pulse, self._pulsed = message.busy, time.monotonic()
        elif (replies := self._calls.get(message.number)) is not None:
            replies.put_nowait(message)

    def _lose(self) -> None:
        self._link = None
        self._documents.clear()
        self._end_all(EngineLost(_LOST))
        if not self._refusing:
            self._on_lost()

    def _end_all(self, error: Exception) -> None:
        for stream in self._streams.values():
            stream.fail(error)
        for replies in self._calls.values():
            replies.put_nowait(error)

    async def _find(self, document_ids: Sequence[str], salt: str) -> list[Document]:
        keys = [(document_id, salt) for document_id in document_ids]
        known = [self._documents.get(key) for key in keys]
        replies = self._replies(
            "registered",
            document_ids=[*document_ids],
            salt=salt,
            known=[edition for edition, _ in known],
        )
        documents, remaining = list[Document](), zip(keys, known, strict=True)
        try:
            async with contextlib.aclosing(replies):
                async for answers in replies:
                    # each reply continues the list, and the last one is None
                    for answer, (key, (_, document)) in zip(answers or (), remaining, strict=False):
                        documents.append(self._registered(key, document, answer))
        except DocumentNotFound:
            # another process may have deleted one of them
            for key in keys:
                self._documents.drop(key)
            raise
        return documents

    def _registered(self, key: tuple[str, str], copy: Document | None, answer: Any) -> Document:
        """The document of an answer; ``copy`` if its edition is the engine's."""
        if answer is None and copy is not None:
            return copy
        edition, text, name, context, tokens = answer
        ids = None if tokens is None else ids_from_bytes(tokens)
        document = Document(text if isinstance(text, str) else tuple(text), name, context, ids)
        self._documents.put(key, edition, document)
        return document

    async def _ask_document(self, method: str, document_id: str, salt: str) -> DocumentInfo:
        info: DocumentInfo = await self._ask(
            method, DocumentInfo, document_id=document_id, salt=salt
        )
        return info

    async def _ask(self, method: str, kind: Any, **arguments: Any) -> Any:
        """The value of a call. Raises its error."""
        values = [value async for value in self._replies(method, **arguments)]
        return msgspec.convert(values[-1], kind)

    async def _replies(self, method: str, **arguments: Any) -> AsyncGenerator[Any, None]:
        """The values of a call; the last one ends it."""
        link, number = self._require_link(), next(self._numbers)
        replies: asyncio.Queue[Reply | Exception] = asyncio.Queue()
        self._calls[number] = replies
        link.send(Call(number, method, arguments))
        try:
            while True:
                reply = await replies.get()
                if isinstance(reply, Exception):
                    raise reply
                if reply.error is not None:
                    raise error_from_wire(reply.error)
                yield reply.value
                if not reply.more:
                    return
        finally:
            del self._calls[number]

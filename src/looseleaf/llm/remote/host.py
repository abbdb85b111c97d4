"""The engine's end of the links: requests in, and one message per step and link out."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from looseleaf.config import IndexConfig
from looseleaf.engine.progress import RequestProgress
from looseleaf.llm.async_llm import AsyncLLM
from looseleaf.llm.engine_thread import Change
from looseleaf.llm.remote.link import Link
from looseleaf.llm.remote.wire import (
    Call,
    Cut,
    Delta,
    DocumentCache,
    Leave,
    Open,
    Pulse,
    Reply,
    Report,
    Step,
    ToEngine,
    WirePart,
    ids_from_bytes,
    ids_to_bytes,
    parts_from_wire,
    request_of,
)
from looseleaf.llm.remote.wire_error import error_to_wire
from looseleaf.prompt.request import Document, SystemPrompt

PULSE_SECONDS = 0.5
"""Interval of the messages that report the age of the engine's step."""

REPLY_BYTES = 1 << 22
"""Size at which a reply with registered documents ends and another one begins."""


class EngineHost:
    """Serves one engine to the processes at the other ends of its links.

    ``documents`` are the latest documents of all requests."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm
        self._links: list[_HostLink] = []
        self.documents = DocumentCache()
        self._held: dict[str, asyncio.Task[None]] = {}
        llm.worker.delivered = self._flush
        self._timer = asyncio.get_running_loop().call_later(PULSE_SECONDS, self._pulse)

    def connect(self, link: socket.socket) -> None:
        """Serve the process at the other end of a socket, until its end."""
        host_link = _HostLink(self, link)
        # a new list, since the engine's thread iterates over the old one
        self._links = [*self._links, host_link]

    def forget(self, link: "_HostLink") -> None:
        """Drop a link that has ended."""
        self._links = [other for other in self._links if other is not link]

    def close(self) -> None:
        """End all links."""
        self._timer.cancel()
        for link in self._links:
            link.link.close()

    async def hold(self, prompt: SystemPrompt) -> None:
        """Compute a system prompt once, for all links. Raises the error of the computation."""
        task = self._held.get(prompt.text)
        if task is None or (task.done() and not task.cancelled() and task.exception()):
            task = self._held[prompt.text] = asyncio.create_task(self.llm.hold(prompt))
        await asyncio.shield(task)

    def _flush(self) -> None:
        """Send the news of a step; called in the engine's thread."""
        for link in self._links:
            link.flush()

    def _pulse(self) -> None:
        pulse = Pulse(self.llm.busy_seconds)
        for link in self._links:
            link.link.send(pulse)
        self._timer = asyncio.get_running_loop().call_later(PULSE_SECONDS, self._pulse)


class _HostStream:
    """A request of a link, and the numbers of tokens that its reader has."""

    def __init__(self, link: "_HostLink", number: int, name: str) -> None:
        self.name = name
        self._link, self._number = link, number
        self._sent: list[int] = []
        self._ended: list[bool] = []
        # one object, by which the engine's thread knows the stream
        self.deliver: Callable[[Change], None] = self._deliver

    def _deliver(self, change: Change) -> None:
        """Note the changes of a step; called in the engine's thread."""
        if isinstance(change, Exception):
            self._link.end(self._number, Report(self._number, error=error_to_wire(change)))
            return
        link, number = self._link, self._number
        is_first = not self._sent
        if is_first:
            self._sent = [0] * len(change.outputs)
            self._ended = [False] * len(change.outputs)
        for index, output in enumerate(change.outputs):
            sent, finish = self._sent[index], output.stop.finish
            total = len(output.token_ids)
            ends = finish is not None and not self._ended[index]
            if total == sent and not ends:
                continue
            self._sent[index], self._ended[index] = total, finish is not None
            logprobs = output.logprobs[sent:] if output.logprobs else None
            reason = None if finish is None else finish.reason
            link.deltas.append(Delta(number, index, output.token_ids[sent:], logprobs, reason))
        if change.finished:
            link.end(number, _report(number, change, is_first=is_first))
        elif is_first:
            link.reports.append(_report(number, change, is_first=True))


def _report(number: int, progress: RequestProgress, *, is_first: bool) -> Report:
    output = progress.output()
    scores = output.prompt_logprobs if is_first else None
    return Report(
        number,
        output.finished,
        reuse=output.reuse,
        metrics=output.metrics,
        attention=output.attention,
        revision=output.revision,
        select=output.select,
        prompt_logprobs=None if scores is None else [*scores],
    )


class _HostLink:
    """One link of the engine's process, its streams and its calls.

    ``reports`` and ``deltas`` are the news of the current step; only the engine's thread uses
    them."""

    def __init__(self, host: EngineHost, link: socket.socket) -> None:
        self._host, self._llm = host, host.llm
        self.reports: list[Report] = []
        self.deltas: list[Delta] = []
        self._streams: dict[int, _HostStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self.link = Link(link, ToEngine, self._take, self._end)

    def flush(self) -> None:
        """Send the news of the current step; called in the engine's thread."""
        if self.reports or self.deltas:
            self.link.send(Step(self.reports, self.deltas))
            self.reports, self.deltas = [], []

    def end(self, number: int, report: Report) -> None:
        """Note the end of a stream; called in the engine's thread."""
        self.reports.append(report)
        self._call_loop(partial(self._streams.pop, number, None))

    def _call_loop(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def _take(self, message: ToEngine) -> None:
        if isinstance(message, Open):
            self._open(message)
        elif isinstance(message, Leave):
            stream = self._streams.pop(message.number, None)
            if stream is not None:
                self._llm.worker.leave(stream.name, stream.deliver)
        elif isinstance(message, Cut):
            stream = self._streams.get(message.number)
            if stream is not None:
                self._llm.worker.end_output(stream.name, message.output)
        else:
            self._start(self._call(message))

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end(self) -> None:
        self._host.forget(self)
        for task in self._tasks:
            task.cancel()
        for stream in self._streams.values():
            self._llm.worker.leave(stream.name, stream.deliver)
        self._streams.clear()

    def _open(self, message: Open) -> None:
        stream = _HostStream(self, message.number, message.name)
        self._streams[message.number] = stream
        if "grammar" in message.params:
            self._start(self._open_after_compiling(message, stream))
            return
        try:
            request = request_of(message, self._host.documents)
            self._llm.worker.open(request, message.since, stream.deliver)
        except Exception as error:
            self._refuse(message.number, error)

    async def _open_after_compiling(self, message: Open, stream: _HostStream) -> None:
        try:
            request = request_of(message, self._host.documents)
            # the reference keeps the cache entry, so the engine's thread never compiles
            _grammar = await self._llm.compile(
                request.params.grammar, request.salt, request.deadline
            )
            if message.number in self._streams:
                self._llm.worker.open(request, message.since, stream.deliver)
                started = asyncio.Event()
                self._llm.worker.put(partial(self._call_loop, started.set))
                await started.wait()
        except Exception as error:
            self._refuse(message.number, error)

    def _refuse(self, number: int, error: Exception) -> None:
        self._streams.pop(number, None)
        self.link.send(Step([Report(number, error=error_to_wire(error))], []))

    async def _call(self, message: Call) -> None:
        number = message.number
        try:
            result = getattr(self, f"_on_{message.method}")(**message.arguments)
            if isinstance(result, AsyncIterator):
                async with contextlib.aclosing(result):  # type: ignore[type-var]
                    async for value in result:
                        self.link.send(Reply(number, value, more=True))
                value = None
            else:
                value = await result
        except Exception as error:
            self.link.send(Reply(number, error=error_to_wire(error)))
        else:
            self.link.send(Reply(number, value))

    # the operations of `Call`

    async def _on_hold(self, text: str, tokens: bytes) -> None:
        await self._host.hold(SystemPrompt(text, ids_from_bytes(tokens)))

    def _on_register(
        self, document: dict[str, Any], parts: list[Any], salt: str, hosted: Any, **options: Any
    ) -> AsyncIterator[Any]:
        wire_parts = msgspec.convert(parts, list[WirePart])
        return self._llm.register_parts(
            Document(**document),
            parts_from_wire(wire_parts, self._host.documents, salt),
            salt=salt,
            hosted=None if hosted is None else IndexConfig(**hosted),
            **options,
        )

    def _on_documents(self, **options: Any) -> Awaitable[Any]:
        return self._llm.documents(**options)

    def _on_document(self, document_id: str, salt: str) -> Awaitable[Any]:
        return self._llm.document(document_id, salt)

    def _on_pin(self, document_id: str, salt: str) -> Awaitable[Any]:
        return self._llm.pin(document_id, salt)

    def _on_unpin(self, document_id: str, salt: str) -> Awaitable[Any]:
        return self._llm.unpin(document_id, salt)

    def _on_delete(self, document_id: str, salt: str) -> Awaitable[Any]:
        return self._llm.delete(document_id, salt)

    async def _on_registered(
        self, document_ids: list[str], salt: str, known: list[Any]
    ) -> AsyncIterator[list[Any]]:
        """Documents and their editions; None for an edition that the caller has already.

        A list ends at `REPLY_BYTES`. The next one waits for the peer, so that steps and pulses
        pass between them."""
        documents, answers, num_bytes = self._llm.engine.documents, list[Any](), 0
        for document_id, last in zip(document_ids, known, strict=True):
            edition = [*documents.edition(document_id, salt)]
            if edition == last:
                answers.append(None)
                continue
            document = documents.get(document_id, salt)
            tokens = None if document.token_ids is None else ids_to_bytes(document.token_ids)
            answers.append([edition, document.text, document.name, document.context, tokens])
            num_bytes += sum(map(len, document.texts)) + len(tokens or b"")
            if num_bytes >= REPLY_BYTES:
                yield answers
                answers, num_bytes = [], 0
                await self.link.drained()
        if answers:
            yield answers

    def _on_holdings(self) -> Awaitable[Any]:
        return self._llm.holdings()

    def _on_writes_done(self) -> Awaitable[None]:
        return self._llm.writes_done()

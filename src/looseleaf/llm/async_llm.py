"""The asyncio face: outputs arrive as they grow, from an engine that steps in its own thread.

Cancelling the task that reads a stream, or leaving its loop, aborts the request and frees its pages
before the next step."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, Unpack

from looseleaf.config import IndexConfig
from looseleaf.engine.documents.entry import DocumentInfo
from looseleaf.engine.engine import Engine
from looseleaf.engine.fork_guard import OfOneProcess
from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.engine.reports.stats import EngineSnapshot, StepStats
from looseleaf.engine.result import Result
from looseleaf.engine.runner.runner import OnProgress
from looseleaf.errors import DeadlineExceeded, EngineClosed, EngineFault, InvalidRequest
from looseleaf.llm.engine_thread import Fail, Outcome, Worker
from looseleaf.llm.llm import make_config
from looseleaf.llm.load import load_engine
from looseleaf.llm.preparation import Preparation
from looseleaf.prompt.options import require_policies
from looseleaf.prompt.request import (
    Document,
    GivenPolicies,
    Message,
    Prompt,
    PromptParts,
    Request,
    SystemPrompt,
    with_policies,
)
from looseleaf.sampling_params import SamplingParams

P = ParamSpec("P")
T = TypeVar("T")


_LATE_SECONDS = 2.0
"""How long after a deadline the engine may say so, before its caller is told without it."""


class AsyncLLM(OfOneProcess):
    """An engine for concurrent callers on one event loop. Close it when done, or use ``async
    with``. It belongs to its process: one that is forked later makes its own.

    ``system_prompt`` stands before every conversation that names no other; it is computed here and
    stays in the cache. ``on_step`` hears of every step, in the engine's thread. ``warm_up``: on a
    GPU the graphs of usual steps are captured now, not when they are first needed;
    ``on_progress`` hears how far that and measuring are.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        system_prompt: str | None = None,
        on_step: Callable[[StepStats], None] | None = None,
        warm_up: bool = False,
        on_progress: OnProgress = lambda stage, done, total: None,
        **options: Any,
    ) -> None:
        config = make_config(options)
        self.engine: Engine = load_engine(model, config, on_progress=on_progress)
        if warm_up:
            self.engine.runner.warm_up(on_progress)
        self.system_prompt: SystemPrompt | None = None
        if system_prompt is not None:
            self.system_prompt = self.engine.prompts.system_prompt(system_prompt)
            held = self.engine.hold(self.system_prompt)
            while self.engine.has_work:
                self.engine.step()
            if held.error is not None:
                raise held.error
        self._ids = count()
        # who waits for the engine's thread, to be told if that never comes back
        self._waiting: set[Fail] = set()
        self._preparation = Preparation(self.engine)
        self._worker = Worker(self.engine, on_step)
        self.engine.hosting.wake = self._worker.wake

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    @property
    def is_open(self) -> bool:
        """Whether new requests are taken: not once it drains, was closed, or broke."""
        return self._worker.is_open

    @property
    def fault(self) -> EngineFault | None:
        """What broke the engine, if anything has."""
        return self._worker.fault

    @property
    def busy_seconds(self) -> float:
        """How long the step under way has taken; 0.0 while there is nothing to do."""
        return self._worker.busy_seconds

    def close(self, timeout: float | None = None) -> bool:
        """Abort what runs, stop the engine's thread, and let go of the tiers.

        A thread that does not come back within ``timeout`` seconds is left with all that it holds,
        after its callers have been told; returns whether it did."""
        self._preparation.close()
        if not self._worker.close(timeout):
            error = EngineClosed("the engine stands still and was left: the answer is not complete")
            for fail in list(self._waiting):
                fail(error)
            return False
        self.engine.close()
        return True

    async def drain(self, timeout: float | None = None, *, patience: float | None = None) -> bool:
        """Take no new request, let those that were accepted end, then close.

        Returns whether all of them ended by themselves; after ``timeout`` seconds the others are
        aborted, and a step that still runs gets ``patience`` seconds, as `close` gives it."""
        self._worker.refuse_new()
        whole = True
        try:
            async with asyncio.timeout(timeout):
                await self._watch(lambda: self._worker.is_idle or None)
        except TimeoutError:
            whole = False
        except (EngineClosed, EngineFault):
            # closed before, with all that ran; a fault is known when the thread has ended
            pass
        return await asyncio.to_thread(self.close, patience) and whole and self.fault is None

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        salt: str = "",
        deadline: float | None = None,
        **policies: Unpack[GivenPolicies],
    ) -> AsyncGenerator[RequestOutput, None]:
        """The growing output of a raw prompt; takes and raises what `LLM.generate` does."""
        require_policies("generate", policies)
        request = self._request(sampling_params, request_id, salt, deadline, policies)
        return self._stream_of(request, prompt, self.engine.prompts.from_parts)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        salt: str = "",
        deadline: float | None = None,
        system_prompt: SystemPrompt | None = None,
        **policies: Unpack[GivenPolicies],
    ) -> AsyncGenerator[RequestOutput, None]:
        """The growing answer to a conversation."""
        require_policies("chat", policies)
        first = system_prompt or self.system_prompt
        request = self._request(sampling_params, request_id, salt, deadline, policies)
        prompts = self.engine.prompts
        return self._stream_of(request, messages, lambda said: prompts.from_messages(said, first))

    async def stream(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """The growing output of a request; leaving the loop, or cancelling its task, aborts it.

        Raises EngineClosed if the engine takes no requests any more, and what ended the request.
        A deadline holds even if the engine's thread stands still."""
        if not isinstance(request, Request):
            raise InvalidRequest(
                f"AsyncLLM.stream takes a Request, not {type(request).__name__}: `generate` gives "
                "the growing output of a prompt, and `chat` that of a conversation"
            )
        loop = asyncio.get_running_loop()
        limit = request.deadline
        due = None if limit is None else loop.time() + limit + _LATE_SECONDS
        newest, arrived = deque[Outcome](), asyncio.Event()
        since = time.perf_counter()

        def take(outcome: Outcome) -> None:
            # an output holds those before it: whoever reads slowly finds the newest, and no heap
            if isinstance(outcome, RequestOutput):
                newest.clear()
            newest.append(outcome)
            arrived.set()

        def deliver(outcome: Outcome) -> None:
            # a loop that has ended takes nothing any more; nobody listens there
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(take, outcome)

        # held until the output ends, so that the engine's thread never compiles
        _held = await self._preparation.compile(request.params.grammar, request.salt, limit)
        with self._told(deliver):
            self._worker.open(request, since, deliver)
            try:
                while True:
                    while not newest:
                        arrived.clear()
                        async with _until(due, limit):
                            await arrived.wait()
                    outcome = newest.popleft()
                    if isinstance(outcome, Exception):
                        raise outcome
                    yield outcome
                    if outcome.finished:
                        return
            finally:
                self._worker.leave(request.request_id, deliver)

    async def prepare(self, salt: str, make: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """What ``make`` returns, such as a prompt, in a thread that salts take in fair turns."""
        return await self._preparation.make(salt, make, *args, **named)

    async def hold_system_prompt(self, text: str) -> SystemPrompt:
        """Compute a system prompt and keep it in the cache, for use in `chat`."""
        prompt = await self.prepare("", self.engine.prompts.system_prompt, text)
        held = await self.call(lambda engine: engine.hold(prompt), new=True)
        await self._watch(lambda: held.finished or None)
        if held.error is not None:
            raise held.error
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
        """Compute a document ahead and keep it under an id; yields how far it is until it is ready.

        Its context is that of a conversation under ``system_prompt``, by default the engine's,
        whose own system text is ``system``. A ``hosted`` one stays outside of the pool and gets
        such an index, for requests with ``select=Select("retrieval")``. Leaving the loop stops
        nothing; `delete` does. Raises what `Documents.register` raises, and what ended the
        computation."""
        first = system_prompt or self.system_prompt
        prompts = self.engine.prompts
        parts = await self.prepare(salt, prompts.from_document, document, first, system)
        info = await self.call(
            lambda engine: engine.documents.register(
                document, parts, document_id, salt, pinned=pinned, hosted=hosted, most=most
            ),
            new=True,
        )
        yield info
        while info.state == "computing":
            info = await self._watch(lambda before=info: self._news(before, salt))  # type: ignore[misc]
            yield info
        error = await self.call(lambda engine: engine.documents.failure(info.id, salt))
        if error is not None:
            raise error

    async def documents(
        self, salt: str = "", *, after: str | None = None, limit: int | None = None
    ) -> list[DocumentInfo]:
        """The registered documents of a salt, oldest first: those behind ``after``, and no more
        than ``limit``. Raises DocumentNotFound if ``after`` is not registered."""
        return await self.call(lambda e: e.documents.all(salt, after=after, limit=limit))

    async def document(self, document_id: str, salt: str = "") -> DocumentInfo:
        """One registered document. Raises DocumentNotFound."""
        return await self.call(lambda engine: engine.documents.stat(document_id, salt))

    def registered(self, document_id: str, salt: str = "") -> Document:
        """A registered document, for use in prompts. Raises DocumentNotFound."""
        return self.engine.documents.get(document_id, salt)

    async def pin(self, document_id: str, salt: str = "") -> DocumentInfo:
        """Keep a document in the cache, computing it again if it was evicted."""
        return await self.call(lambda engine: engine.documents.pin(document_id, salt))

    async def unpin(self, document_id: str, salt: str = "") -> DocumentInfo:
        """Let a document be evicted again."""
        return await self.call(lambda engine: engine.documents.unpin(document_id, salt))

    async def delete(self, document_id: str, salt: str = "") -> DocumentInfo:
        """Forget a document; returns what it was."""
        return await self.call(lambda engine: engine.documents.delete(document_id, salt))

    def snapshot(self) -> EngineSnapshot:
        """The engine after its latest step, from any thread and without waiting."""
        return self._worker.snapshot

    async def call(self, function: Callable[[Engine], T], *, new: bool = False) -> T:
        """What ``function`` returns, called in the engine's thread between two steps.

        ``new`` work is refused while the engine drains. Raises what ``function`` raises, and
        EngineClosed."""
        result: Result[T] = Result(asyncio.get_running_loop())

        def command() -> None:
            try:
                result.settle(function(self.engine))
            except Exception as error:
                result.fail(error)

        with self._told(result.fail):
            self._worker.put(command, new=new)
            return await result.future

    async def _watch(self, look: Callable[[], T | None]) -> T:
        """The first answer of ``look`` that is not None; asked now and after every step, in the
        engine's thread."""
        result: Result[T] = Result(asyncio.get_running_loop())

        def done() -> bool:
            value = look()
            if value is not None:
                result.settle(value)
            return value is not None or result.future.cancelled()

        with self._told(result.fail):
            self._worker.watch(done, result.fail)
            return await result.future

    @contextmanager
    def _told(self, fail: Fail) -> Iterator[None]:
        """``fail`` hears if the engine's thread is left."""
        self._waiting.add(fail)
        try:
            yield
        finally:
            self._waiting.discard(fail)

    def _news(self, before: DocumentInfo, salt: str) -> DocumentInfo | None:
        info = self.engine.documents.stat(before.id, salt)
        return (
            None if (info.state, info.tokens_done) == (before.state, before.tokens_done) else info
        )

    def _stream_of(
        self, request: Request, given: Any, make: Callable[[Any], PromptParts]
    ) -> AsyncGenerator[RequestOutput, None]:
        """The output of ``request`` with the prompt that ``make`` makes of what is ``given``."""
        if self._preparation.is_quick(given):
            return self.stream(replace(request, parts=make(given)))
        # a caller may go on to write into a list of its own
        kept = [*given] if isinstance(given, list) else given
        return self._stream_of_long(request, lambda: make(kept))

    async def _stream_of_long(
        self, request: Request, make: Callable[[], PromptParts]
    ) -> AsyncGenerator[RequestOutput, None]:
        # half a second for a megabyte, in which others on the loop go on
        parts = await self.prepare(request.salt, make)
        stream = self.stream(replace(request, parts=parts))
        async with contextlib.aclosing(stream):
            async for output in stream:
                yield output

    def _request(
        self,
        params: SamplingParams | None,
        request_id: str | None,
        salt: str,
        deadline: float | None,
        policies: GivenPolicies,
    ) -> Request:
        """A request whose prompt is still to come."""
        name = request_id or f"async-{next(self._ids)}"
        params = SamplingParams() if params is None else params
        return with_policies(Request(name, (), params, salt, deadline), **policies)


@asynccontextmanager
async def _until(due: float | None, limit: float | None) -> AsyncIterator[None]:
    """Raises DeadlineExceeded at ``due`` on the loop's clock, for a deadline of ``limit``."""
    try:
        async with asyncio.timeout_at(due):
            yield
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"the engine stands still, and the request did not end within its deadline of {limit} "
            "s: ask another server, or again in a while"
        ) from error

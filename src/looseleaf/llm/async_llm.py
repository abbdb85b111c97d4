"""The asyncio API: streams of growing outputs from an engine that steps in its own thread.

Cancelling the task of a stream, or leaving its loop, aborts the request. Its pages are free before
the next step."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, Unpack

from looseleaf.config import IndexConfig
from looseleaf.engine.documents.entry import DocumentInfo
from looseleaf.engine.documents.holdings import HeldDocuments
from looseleaf.engine.engine import Engine
from looseleaf.engine.lifetime import ProcessBound
from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.engine.reports.stats import EngineSnapshot, StepStats
from looseleaf.engine.runner.runner import OnProgress
from looseleaf.engine.sampling.grammar import Compiled
from looseleaf.errors import DeadlineExceeded, EngineClosed, EngineFault, InvalidRequest
from looseleaf.llm.client import EngineFacts
from looseleaf.llm.engine_calls import EngineCalls
from looseleaf.llm.engine_thread import Change, Worker
from looseleaf.llm.llm import make_config
from looseleaf.llm.load import load_engine
from looseleaf.llm.preparation import Preparation
from looseleaf.llm.result import Result
from looseleaf.llm.scoring import Score, ScoreOptions, gather_scores, score_requests
from looseleaf.models.tokenizer.tokenizer import Tokenizer
from looseleaf.prompt.builder import PromptBuilder
from looseleaf.prompt.request import (
    Document,
    Message,
    PolicyOptions,
    Prompt,
    PromptParts,
    Request,
    SystemPrompt,
    require_policies,
    with_policies,
)
from looseleaf.sampling_params import Grammar, SamplingParams

P = ParamSpec("P")
T = TypeVar("T")


_Outcome = RequestOutput | Exception

_GRACE_SECONDS = 2.0
"""Seconds after a deadline in which the engine may report it; then the stream raises by itself."""


class AsyncLLM(ProcessBound):
    """An engine for concurrent callers on an event loop.

    Call `close` after use, or use ``async with``. Forked processes must create their own AsyncLLM.
    Every conversation begins with ``system_prompt`` by default; it is computed here and stays in
    the cache. ``on_step`` gets the statistics of every step, in the engine's thread. ``warm_up``
    captures the CUDA graphs of usual steps in advance. ``on_progress(stage, completed, total)``
    reports the warmup and measurements. Raises as `LLM`.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        system_prompt: str | None = None,
        on_step: Callable[[StepStats], None] | None = None,
        warm_up: bool = False,
        on_progress: OnProgress = lambda stage, completed, total: None,
        **options: Any,
    ) -> None:
        config = make_config(options)
        self.engine: Engine = load_engine(model, config, on_progress=on_progress)
        if warm_up:
            self.engine.runner.warm_up(on_progress)
        self.system_prompt: SystemPrompt | None = None
        if system_prompt is not None:
            self.system_prompt = self.engine.prompts.system_prompt(system_prompt)
            progress = self.engine.hold(self.system_prompt)
            while self.engine.has_work:
                self.engine.step()
            if progress.error is not None:
                raise progress.error
        self._ids = count()
        self._preparation = Preparation(self.engine)
        self._worker = Worker(self.engine, on_step)
        self._calls = EngineCalls(self.engine, self._worker)
        self.engine.hosting.wake = self._worker.wake

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    @property
    def worker(self) -> Worker:
        """The engine's thread, for callers that deliver tokens by themselves."""
        return self._worker

    @property
    def facts(self) -> EngineFacts:
        """Fixed properties of the engine."""
        engine = self.engine
        return EngineFacts(
            max_model_len=engine.max_model_len,
            max_num_seqs=engine.max_num_seqs,
            vocab_size=engine.prompts.vocab_size,
            dtype=str(engine.runner.model.dtype).removeprefix("torch."),
            disk_path=engine.config.tiers.disk_path,
            threads=None if engine.threads is None else str(engine.threads),
        )

    @property
    def prompts(self) -> PromptBuilder:
        """The engine's prompt builder; thread-safe."""
        return self.engine.prompts

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        return self.engine.tokenizer

    @property
    def is_open(self) -> bool:
        """Whether new requests are accepted: False after `drain`, `close` and a fault."""
        return self._worker.is_open

    @property
    def is_lost(self) -> bool:
        """False: this process is the engine's."""
        return False

    @property
    def fault(self) -> EngineFault | None:
        """The error that broke the engine, else None."""
        return self._worker.fault

    @property
    def busy_seconds(self) -> float:
        """Seconds since the current step began; 0.0 while idle."""
        return self._worker.busy_seconds

    def close(self, timeout: float | None = None) -> bool:
        """Abort all requests, stop the engine's thread and close the tiers.

        Returns False if the thread does not end within ``timeout`` seconds. Then pending calls
        raise EngineClosed, and the thread keeps its resources."""
        self._preparation.close()
        if not self._worker.close(timeout):
            error = "the engine does not respond and was abandoned: the answer is not complete"
            self._calls.abandon(EngineClosed(error))
            return False
        self.engine.close()
        return True

    async def drain(self, timeout: float | None = None, *, patience: float | None = None) -> bool:
        """Reject new requests, wait for accepted requests, then close.

        After ``timeout`` seconds the rest is aborted. ``patience`` is the timeout of `close`.
        Returns whether all requests ended by themselves."""
        self._worker.refuse_new()
        completed = True
        try:
            async with asyncio.timeout(timeout):
                await self._calls.watch(lambda: self._worker.is_idle or None)
        except TimeoutError:
            completed = False
        except (EngineClosed, EngineFault):
            # `fault` is set once the thread has ended
            pass
        return await asyncio.to_thread(self.close, patience) and completed and self.fault is None

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        salt: str = "",
        deadline: float | None = None,
        **policies: Unpack[PolicyOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """The growing output of a raw prompt; arguments and errors as in `LLM.generate`."""
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
        **policies: Unpack[PolicyOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """The growing answer to a conversation; arguments and errors as in `LLM.chat`."""
        require_policies("chat", policies)
        first = system_prompt or self.system_prompt
        request = self._request(sampling_params, request_id, salt, deadline, policies)
        prompts = self.engine.prompts
        return self._stream_of(request, messages, lambda m: prompts.from_messages(m, first))

    async def score(
        self, prompts: Any, continuations: Any, **options: Unpack[ScoreOptions]
    ) -> list[Score]:
        """The log-probabilities of continuations; arguments and errors as in `LLM.score`."""
        name, salt = (lambda: f"async-{next(self._ids)}"), options.get("salt", "")
        requests = await self.prepare(
            salt, score_requests, self.prompts, prompts, continuations, name, options
        )
        return await gather_scores(self.stream, requests)

    async def stream(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """The growing output of a request; leaving the loop, or cancelling its task, aborts it.

        Raises EngineClosed if the engine accepts no requests, and the error of the request. A
        deadline holds even if the engine's thread does not respond."""
        if not isinstance(request, Request):
            raise InvalidRequest(
                f"AsyncLLM.stream takes a Request, not {type(request).__name__}: `generate` gives "
                "the growing output of a prompt, and `chat` that of a conversation"
            )
        loop = asyncio.get_running_loop()
        limit = request.deadline
        due = None if limit is None else loop.time() + limit + _GRACE_SECONDS
        newest, arrived = deque[_Outcome](), asyncio.Event()
        since = time.perf_counter()

        def take(outcome: _Outcome) -> None:
            # an output contains all earlier outputs, so slow readers get only the newest
            if isinstance(outcome, RequestOutput):
                newest.clear()
            newest.append(outcome)
            arrived.set()

        def deliver(change: Change) -> None:
            outcome = change if isinstance(change, Exception) else change.output()
            # the loop may be closed, without readers
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(take, outcome)

        # the reference keeps the cache entry, so the engine's thread never compiles
        _grammar = await self._preparation.compile(request.params.grammar, request.salt, limit)
        with self._calls.pending(deliver):
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

    async def compile(
        self, grammar: Grammar | None, salt: str, limit: float | None
    ) -> Compiled | None:
        """The compiled grammar of a request, as by `Preparation.compile`."""
        return await self._preparation.compile(grammar, salt, limit)

    async def prepare(self, salt: str, make: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """The result of ``make``, such as a prompt, from threads that salts share fairly."""
        return await self._preparation.make(salt, make, *args, **named)

    async def hold_system_prompt(self, text: str) -> SystemPrompt:
        """Compute a system prompt and keep it in the cache, for use in `chat`."""
        prompt = await self.prepare("", self.engine.prompts.system_prompt, text)
        await self.hold(prompt)
        return prompt

    async def hold(self, prompt: SystemPrompt) -> None:
        """Compute the tokens of a system prompt, and keep them in the cache."""
        progress = await self.call(lambda engine: engine.hold(prompt), new=True)
        await self._calls.watch(lambda: progress.finished or None)
        if progress.error is not None:
            raise progress.error

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
        """Compute a document in advance and keep it under an id; yields its progress.

        Its context is a conversation with ``system_prompt``, by default the engine's, and the
        system text ``system``. A ``hosted`` document is in host memory with this index, for
        ``select=Select("retrieval")``. Leaving the loop does not stop the computation; `delete`
        does. Raises as `Documents.register`, and the error of the computation."""
        first = system_prompt or self.system_prompt
        prompts = self.engine.prompts
        parts = await self.prepare(salt, prompts.from_document, document, first, system)
        progress = self.register_parts(
            document,
            parts,
            document_id=document_id,
            salt=salt,
            pinned=pinned,
            hosted=hosted,
            most=most,
        )
        async with contextlib.aclosing(progress):
            async for info in progress:
                yield info

    async def register_parts(
        self,
        document: Document,
        parts: PromptParts,
        *,
        document_id: str | None = None,
        salt: str = "",
        pinned: bool = False,
        hosted: IndexConfig | None = None,
        most: int | None = None,
    ) -> AsyncGenerator[DocumentInfo, None]:
        """As `register`, of a document whose prompt is tokenized."""
        info = await self.call(
            lambda engine: engine.documents.register(
                document, parts, document_id, salt, pinned=pinned, hosted=hosted, most=most
            ),
            new=True,
        )
        yield info
        while info.state == "computing":
            info = await self._calls.watch(lambda before=info: self._changed_info(before, salt))  # type: ignore[misc]
            yield info
        error = await self.call(lambda engine: engine.documents.failure(info.id, salt))
        if error is not None:
            raise error

    async def documents(
        self, salt: str = "", *, after: str | None = None, limit: int | None = None
    ) -> list[DocumentInfo]:
        """At most ``limit`` registered documents of a salt, oldest first, from ``after`` on.

        Raises DocumentNotFound if ``after`` is not registered."""
        return await self.call(lambda e: e.documents.all(salt, after=after, limit=limit))

    async def document(self, document_id: str, salt: str = "") -> DocumentInfo:
        """The state of a registered document. Raises DocumentNotFound."""
        return await self.call(lambda engine: engine.documents.stat(document_id, salt))

    def registered(self, document_ids: Sequence[str], salt: str = "") -> list[Document]:
        """Registered documents, for use in prompts. Raises DocumentNotFound."""
        return [self.engine.documents.get(document_id, salt) for document_id in document_ids]

    async def pin(self, document_id: str, salt: str = "") -> DocumentInfo:
        """Keep a document in the cache; recomputes it if evicted. Raises DocumentNotFound."""
        return await self.call(lambda engine: engine.documents.pin(document_id, salt))

    async def unpin(self, document_id: str, salt: str = "") -> DocumentInfo:
        """Allow eviction of a document again. Raises DocumentNotFound."""
        return await self.call(lambda engine: engine.documents.unpin(document_id, salt))

    async def delete(self, document_id: str, salt: str = "") -> DocumentInfo:
        """Delete a document; returns its last state. Raises DocumentNotFound."""
        return await self.call(lambda engine: engine.documents.delete(document_id, salt))

    async def holdings(self) -> HeldDocuments:
        """The documents that the engine holds, and its load."""
        return await self.call(Engine.held_documents)

    async def writes_done(self) -> None:
        """Return after all writes to tiers that are pending now."""
        if self.engine.tiers is None:
            return
        result: Result[None] = Result(asyncio.get_running_loop())
        self.engine.tiers.when_written(lambda: result.settle(None))
        await result.future

    def snapshot(self) -> EngineSnapshot:
        """The engine's state after its latest step; callable from any thread."""
        return self._worker.snapshot

    async def call(self, function: Callable[[Engine], T], *, new: bool = False) -> T:
        """The result of ``function``, called in the engine's thread between two steps.

        A draining engine rejects ``new`` work. Raises the errors of ``function``, and EngineClosed.
        """
        return await self._calls.call(function, new=new)

    def _changed_info(self, before: DocumentInfo, salt: str) -> DocumentInfo | None:
        info = self.engine.documents.stat(before.id, salt)
        return (
            None if (info.state, info.tokens_done) == (before.state, before.tokens_done) else info
        )

    def _stream_of(
        self, request: Request, prompt: Any, tokenize: Callable[[Any], PromptParts]
    ) -> AsyncGenerator[RequestOutput, None]:
        """The output of ``request`` with the tokens of ``prompt``."""
        if self._preparation.is_quick(prompt):
            return self.stream(replace(request, parts=tokenize(prompt)))
        # a copy, since callers may change their list
        copy = [*prompt] if isinstance(prompt, list) else prompt
        return self._stream_of_long(request, lambda: tokenize(copy))

    async def _stream_of_long(
        self, request: Request, tokenize: Callable[[], PromptParts]
    ) -> AsyncGenerator[RequestOutput, None]:
        # half a second per megabyte, which must not block the loop
        parts = await self.prepare(request.salt, tokenize)
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
        policies: PolicyOptions,
    ) -> Request:
        """A request with an empty prompt."""
        name = request_id or f"async-{next(self._ids)}"
        params = SamplingParams() if params is None else params
        return with_policies(Request(name, (), params, salt, deadline), **policies)


@asynccontextmanager
async def _until(due: float | None, limit: float | None) -> AsyncIterator[None]:
    """Raises DeadlineExceeded at ``due`` (the loop's clock, s), for a deadline of ``limit`` s."""
    try:
        async with asyncio.timeout_at(due):
            yield
    except TimeoutError as error:
        raise DeadlineExceeded(
            "the engine does not respond, and the request did not end within its deadline of "
            f"{limit} s: try another server, or try again later"
        ) from error

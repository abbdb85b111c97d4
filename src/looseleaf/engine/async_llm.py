"""The asyncio face: the engine steps in a thread of its own, outputs arrive as they grow.

Cancelling the task that reads a stream, or leaving its loop, aborts the request and frees its pages
before the next step."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from looseleaf.engine.engine import Engine
from looseleaf.engine.llm import make_config
from looseleaf.engine.loading import load_engine
from looseleaf.engine.outputs import RequestOutput
from looseleaf.engine.progress import RequestProgress
from looseleaf.engine.request import Message, Prompt, PromptParts, Request
from looseleaf.errors import LooseleafError
from looseleaf.sampling_params import SamplingParams

_Outcome = RequestOutput | Exception


class AsyncLLM:
    """An engine for concurrent callers on one event loop. Close it when done, or use ``async
    with``.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        self.engine: Engine = load_engine(model, make_config(options))
        self._ids = count()
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._streams: dict[str, Callable[[_Outcome], None]] = {}
        # no command may follow the last one, or its caller would wait for ever
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="looseleaf-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Abort what runs and stop the engine's thread."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._commands.put(None)
        self._thread.join()

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """The growing output of a raw prompt; raises what `LLM.generate` raises."""
        return self._stream(self.engine.prompts.from_parts(prompt), sampling_params, request_id)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """The growing answer to a conversation."""
        return self._stream(
            self.engine.prompts.from_messages(messages), sampling_params, request_id
        )

    async def _stream(
        self, parts: PromptParts, sampling_params: SamplingParams | None, request_id: str | None
    ) -> AsyncIterator[RequestOutput]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[_Outcome] = asyncio.Queue()
        name = request_id or f"async-{next(self._ids)}"
        request = Request(name, parts, sampling_params or SamplingParams())

        def deliver(outcome: _Outcome) -> None:
            # a loop that has ended takes nothing any more; nobody listens there
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(arrived.put_nowait, outcome)

        with self._lock:
            if self._closed:
                raise LooseleafError("this AsyncLLM is closed: make a new one")
            self._commands.put(lambda: self._add(request, deliver))
        try:
            while True:
                outcome = await arrived.get()
                if isinstance(outcome, Exception):
                    raise outcome
                yield outcome
                if outcome.finished:
                    return
        finally:
            self._commands.put(lambda: self._abort(name, deliver))

    # what follows runs in the engine's thread

    def _add(self, request: Request, deliver: Callable[[_Outcome], None]) -> None:
        try:
            self.engine.add(request)
        except Exception as error:
            deliver(error)
        else:
            self._streams[request.request_id] = deliver

    def _abort(self, name: str, deliver: Callable[[_Outcome], None]) -> None:
        # only the stream that owns the id: a refused duplicate must not end the first
        if self._streams.get(name) is deliver:
            del self._streams[name]
            self.engine.abort(name)

    def _work(self) -> None:
        while True:
            try:
                command = self._commands.get(block=not self.engine.has_work)
            except Empty:
                self._step()
                continue
            if command is None:
                for name in list(self._streams):
                    self._fail(name, LooseleafError("the engine was closed"))
                return
            command()

    def _step(self) -> None:
        try:
            changed = self.engine.step()
        except Exception as error:
            # the engine has ended the requests of the step; if it ended none, none could go on
            ended = [name for name in self._streams if not self.engine.knows(name)]
            for name in ended or list(self._streams):
                self._fail(name, error)
            return
        for progress in changed:
            self._publish(progress)

    def _publish(self, progress: RequestProgress) -> None:
        name = progress.request.request_id
        deliver = self._streams.get(name)
        if deliver is None:
            return
        if progress.error is not None:
            self._fail(name, progress.error)
            return
        deliver(progress.output())
        if progress.finished:
            del self._streams[name]

    def _fail(self, name: str, error: Exception) -> None:
        deliver = self._streams.pop(name)
        self.engine.abort(name)
        deliver(error)

"""A request at the reader's end: tokens become text, and stop strings end the text.

The engine knows token ids only. The text of an output ends exactly as in one process."""

import asyncio
from collections.abc import Callable

from looseleaf.engine.input_processor import answer_stream
from looseleaf.engine.reports.outputs import (
    AttentionPath,
    RequestMetrics,
    ReuseReport,
    RevisionReport,
    SelectReport,
)
from looseleaf.engine.sampling.sampler import TokenLogprob
from looseleaf.engine.sampling.stopping import StopChecker
from looseleaf.llm.remote.wire import Delta, Report
from looseleaf.llm.remote.wire_error import error_from_wire
from looseleaf.models.tokenizer.tokenizer import Tokenizer
from looseleaf.prompt.request import Request

# only the engine knows the room in the context
_NO_LIMIT = 1 << 62


class RemoteOutput:
    """One growing output, with the properties of `CompletionOutput`."""

    __slots__ = ("_detokenizer", "_finished", "_stop", "index", "logprobs", "token_ids")

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer) -> None:
        params = request.params
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: list[tuple[TokenLogprob, ...]] | None = (
            None if params.logprobs is None else []
        )
        self._stop = StopChecker(
            params, max_tokens=_NO_LIMIT, eos_token_ids=tokenizer.eos_token_ids
        )
        self._detokenizer = answer_stream(tokenizer, request)
        self._finished = False

    @property
    def text(self) -> str:
        """The output so far, without text that may belong to a stop string."""
        return self._stop.visible_text

    @property
    def finish_reason(self) -> str | None:
        """The reason of the end, None before the engine has confirmed it."""
        finish = self._stop.finish
        return finish.reason if self._finished and finish is not None else None

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token that ended the output."""
        finish = self._stop.finish
        return finish.stop if self._finished and finish is not None else None

    def take(self, delta: Delta) -> bool:
        """Append new tokens; whether the text has ended before the engine's output."""
        stop, detokenizer = self._stop, self._detokenizer
        had_ended = stop.finish is not None
        for number, token in enumerate(delta.tokens):
            if stop.finish is not None:
                break
            self.token_ids.append(token)
            if self.logprobs is not None and delta.logprobs:
                self.logprobs.append(delta.logprobs[number])
            text = "" if stop.drops(token) else detokenizer.push(token)
            if stop.push(token, text) is not None:
                stop.end_text(detokenizer.finish())
        if delta.finish is None:
            return stop.finish is not None and not had_ended
        if stop.finish is None:
            stop.close(delta.finish)  # type: ignore[arg-type]
            # the output may end inside a character
            stop.end_text(detokenizer.finish())
        self._finished = True
        return False


class RemoteStream:
    """A growing request, with the properties of `RequestOutput`; its reader waits by `changed`.

    ``cut`` is called with the index of an output whose text has ended."""

    def __init__(self, request: Request, tokenizer: Tokenizer, cut: Callable[[int], None]) -> None:
        self.request = request
        self.outputs = [RemoteOutput(n, request, tokenizer) for n in range(request.params.n)]
        self.reuse = ReuseReport()
        self.metrics = RequestMetrics()
        self.attention = AttentionPath()
        self.revision: RevisionReport | None = None
        self.select: SelectReport | None = None
        self.prompt_logprobs: list[tuple[TokenLogprob, ...] | None] | None = None
        self.finished = False
        self.error: Exception | None = None
        self._cut = cut
        self._is_new = False
        self._reader: asyncio.Future[None] | None = None

    @property
    def is_read(self) -> bool:
        """Whether the reader has all changes."""
        return not self._is_new

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.request.token_ids

    @property
    def text(self) -> str:
        """The text of the first output."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the first output."""
        return self.outputs[0].token_ids

    def report(self, report: Report) -> None:
        """Take the engine's report, or its error."""
        if report.error is not None:
            self.fail(error_from_wire(report.error))
            return
        self.finished = report.finished
        self.reuse = report.reuse or self.reuse
        self.metrics = report.metrics or self.metrics
        self.attention = report.attention or self.attention
        self.revision, self.select = report.revision, report.select
        self.prompt_logprobs = report.prompt_logprobs or self.prompt_logprobs
        self._wake()

    def take(self, delta: Delta) -> None:
        """Take new tokens."""
        if self.outputs[delta.output].take(delta):
            self._cut(delta.output)
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream with an error, unless it has ended."""
        if self.error is None and not self.finished:
            self.error = error
            self._wake()

    async def changed(self) -> None:
        """Return when the stream has changed since the previous call. Raises its error, after all
        changes before it."""
        while not self._is_new:
            if self.error is not None:
                raise self.error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        self._is_new = False

    def _wake(self) -> None:
        self._is_new = self._is_new or self.error is None
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

"""From outputs to answers in OpenAI's forms: whole, or as the chunks of a stream."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from looseleaf.engine.reports.outputs import CompletionOutput, RequestOutput
from looseleaf.models.tokenizer.tokenizer import Tokenizer
from looseleaf.server import report
from looseleaf.server.generation import Generation

Json = dict[str, Any]


@runtime_checkable
class Form(Protocol):
    """How one kind of endpoint writes a choice. ``top`` is None without log-probabilities."""

    whole_object: str
    chunk_object: str
    prefix: str

    def opening(self) -> Json | None:
        """What a choice's first chunk says before its text, if anything."""

    def piece(
        self, text: str, entries: Sequence[report.Entry] | None, offsets: report.TextOffsets
    ) -> Json:
        """More text, and the entries of the tokens that are new; ``offsets`` knows those before."""

    def ending(self) -> Json:
        """What the last chunk of a choice holds besides the reason."""

    def whole(self, output: CompletionOutput, offsets: report.TextOffsets) -> Json:
        """A finished choice; ``offsets`` knows the prompt."""


@dataclass(frozen=True)
class ChatForm:
    """Chat completions."""

    tokenizer: Tokenizer
    top: int
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def opening(self) -> Json | None:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def piece(
        self, text: str, entries: Sequence[report.Entry] | None, offsets: report.TextOffsets
    ) -> Json:
        return {"delta": {"content": text}, "logprobs": self._logprobs(entries)}

    def ending(self) -> Json:
        return {"delta": {}, "logprobs": None}

    def whole(self, output: CompletionOutput, offsets: report.TextOffsets) -> Json:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(output.logprobs)}

    def _logprobs(self, entries: Sequence[report.Entry] | None) -> Json | None:
        return None if entries is None else report.chat_logprobs(entries, self.top, self.tokenizer)


@dataclass(frozen=True)
class CompletionForm:
    """Completions of raw prompts."""

    tokenizer: Tokenizer
    top: int
    whole_object = "text_completion"
    chunk_object = "text_completion"
    prefix = "cmpl-"

    def opening(self) -> Json | None:
        return None

    def piece(
        self, text: str, entries: Sequence[report.Entry] | None, offsets: report.TextOffsets
    ) -> Json:
        return {"text": text, "logprobs": self._logprobs(entries, offsets)}

    def ending(self) -> Json:
        return {"text": "", "logprobs": None}

    def whole(self, output: CompletionOutput, offsets: report.TextOffsets) -> Json:
        return self.piece(output.text, output.logprobs, offsets)

    def _logprobs(
        self, entries: Sequence[report.Entry] | None, offsets: report.TextOffsets
    ) -> Json | None:
        if entries is None:
            return None
        return report.completion_logprobs(entries, self.top, self.tokenizer, offsets)


@dataclass
class _Told:
    """How much of a choice a stream has told."""

    offsets: report.TextOffsets
    characters: int = 0
    tokens: int = 0
    opened: bool = False
    ended: bool = False


@dataclass(eq=False)
class Answer:
    """The answer to one API request, in one form."""

    generation: Generation
    form: Form
    model: str
    include_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    _told: dict[int, _Told] = field(default_factory=dict)

    async def whole(self) -> Json:
        """The answer when all of it is there."""
        updates = self.generation.updates()
        async with aclosing(updates):
            async for _ in updates:
                pass
        choices = [
            {
                "index": self._index(number, output.index),
                **self.form.whole(output, self._offsets(done)),
                "finish_reason": output.finish_reason,
            }
            for number, done in enumerate(self.generation.latest)
            for output in done.outputs
        ]
        header = self._header(self.form.whole_object)
        return {**header, "choices": choices, "usage": self._usage(), "looseleaf": self._reuse()}

    async def chunks(self) -> AsyncGenerator[Json, None]:
        """The answer as it grows. The first chunk and the last one say what was reused."""
        began = False
        updates = self.generation.updates()
        async with aclosing(updates):
            async for number, output in updates:
                made = [c for one in output.outputs for c in self._grown(number, one, output)]
                if made and not began and len(self.generation.prompts) == 1:
                    made[0]["looseleaf"] = self._reuse()
                began = began or bool(made)
                if self.generation.finished and not self.include_usage:
                    made[-1]["looseleaf"] = self._reuse()
                for chunk in made:
                    yield chunk
        if self.include_usage:
            usage = {"choices": [], "usage": self._usage(), "looseleaf": self._reuse()}
            yield {**self._header(self.form.chunk_object), **usage}

    def _grown(self, number: int, output: CompletionOutput, request: RequestOutput) -> list[Json]:
        told = self._told_of(self._index(number, output.index), request)
        if told.ended:
            return []
        made: list[Json] = []
        text = output.text[told.characters :]
        entries = None if output.logprobs is None else output.logprobs[told.tokens :]
        opening = None if told.opened else self.form.opening()
        if opening is not None:
            made.append(self._chunk(number, output.index, opening))
        told.opened = True
        if text or entries:
            piece = self.form.piece(text, entries, told.offsets)
            made.append(self._chunk(number, output.index, piece))
            told.characters += len(text)
            told.tokens += len(entries or ())
        if output.finish_reason is not None:
            told.ended = True
            ending = self._chunk(number, output.index, self.form.ending())
            ending["choices"][0]["finish_reason"] = output.finish_reason
            made.append(ending)
        return made

    def _told_of(self, index: int, request: RequestOutput) -> _Told:
        told = self._told.get(index)
        if told is None:
            told = self._told[index] = _Told(self._offsets(request))
        return told

    def _offsets(self, request: RequestOutput) -> report.TextOffsets:
        tokenizer = self.generation.service.llm.engine.tokenizer
        return report.TextOffsets(tokenizer, request.prompt_token_ids)

    def _chunk(self, number: int, index: int, content: Json) -> Json:
        choice = {"index": self._index(number, index), **content, "finish_reason": None}
        usage = {"usage": None} if self.include_usage else {}
        return {**self._header(self.form.chunk_object), "choices": [choice], **usage}

    def _index(self, number: int, index: int) -> int:
        return number * self.generation.params.n + index

    def _header(self, kind: str) -> Json:
        return {
            "id": self.form.prefix + self.generation.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.generation.service.fingerprint,
        }

    def _usage(self) -> Json:
        return report.usage(self.generation.latest)

    def _reuse(self) -> Json:
        labels = [prompt.labels for prompt in self.generation.prompts]
        return report.reuse(self.generation.latest, labels)

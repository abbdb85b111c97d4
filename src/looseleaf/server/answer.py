"""From engine outputs to OpenAI's JSON: complete answers, or the chunks of a stream."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from looseleaf.llm.client import Completion, Output
from looseleaf.models.tokenizer.tokenizer import Tokenizer
from looseleaf.server import report
from looseleaf.server.errors import ApiError
from looseleaf.server.events import DONE, Event, Frame
from looseleaf.server.generation import Generation
from looseleaf.server.tools.reader import AnswerReader

Json = dict[str, Any]


@runtime_checkable
class Form(Protocol):
    """The JSON of a choice at one endpoint."""

    whole_object: str
    chunk_object: str
    prefix: str

    def opening(self, request: Output, offsets: report.TextOffsets) -> Json | None:
        """Content of the chunk before the text, None for no chunk."""

    def piece(
        self, text: str, entries: Sequence[report.Entry] | None, offsets: report.TextOffsets
    ) -> Json:
        """Content of a chunk: new text, and log-probabilities of new tokens."""

    def ending(self) -> Json:
        """Content of the last chunk, which has the finish reason."""

    def whole(self, output: Completion, request: Output) -> Json:
        """Content of a complete choice, with its finish reason if it has another."""

    def scores(self, requests: Sequence[Output]) -> Json:
        """Prompt log-probabilities of the answer besides those of its choices."""

    def offsets(self, request: Output) -> report.TextOffsets:
        """The offsets of a choice's tokens in its text."""

    def reader(self) -> AnswerReader | None:
        """A reader of one choice; None if the whole text is content."""


@dataclass(frozen=True)
class ChatForm:
    """Chat completions."""

    tokenizer: Tokenizer
    top: int
    make_reader: Callable[[], AnswerReader] | None = None
    num_scores: int | None = None
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def opening(self, request: Output, offsets: report.TextOffsets) -> Json | None:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def piece(
        self, text: str, entries: Sequence[report.Entry] | None, offsets: report.TextOffsets
    ) -> Json:
        return {"delta": {"content": text}, "logprobs": self._logprobs(entries)}

    def ending(self) -> Json:
        return {"delta": {}, "logprobs": None}

    def scores(self, requests: Sequence[Output]) -> Json:
        if self.num_scores is None:
            return {}
        (request,) = requests
        scores = report.prompt_logprobs(request, self.num_scores, self.tokenizer)
        return {"prompt_logprobs": scores}

    def offsets(self, request: Output) -> report.TextOffsets:
        return report.TextOffsets(self.tokenizer, request.prompt_token_ids)

    def whole(self, output: Completion, request: Output) -> Json:
        reader, logprobs = self.reader(), self._logprobs(output.logprobs)
        if reader is None:
            message = {"role": "assistant", "content": output.text, "refusal": None}
            return {"message": message, "logprobs": logprobs}
        message = reader.message(output.text)
        reason = _finish_reason(reader, output.finish_reason)
        return {"message": message, "logprobs": logprobs, "finish_reason": reason}

    def reader(self) -> AnswerReader | None:
        return None if self.make_reader is None else self.make_reader()

    def _logprobs(self, entries: Sequence[report.Entry] | None) -> Json | None:
        return None if entries is None else report.chat_logprobs(entries, self.top, self.tokenizer)


@dataclass(frozen=True)
class CompletionForm:
    """Completions of raw prompts; with ``echoes`` a text begins with its prompt."""

    tokenizer: Tokenizer
    top: int
    echoes: bool = False
    num_scores: int | None = None
    whole_object = "text_completion"
    chunk_object = "text_completion"
    prefix = "cmpl-"

    def opening(self, request: Output, offsets: report.TextOffsets) -> Json | None:
        return self._echo(request, offsets) if self.echoes else None

    def piece(
        self, text: str, entries: Sequence[report.Entry] | None, offsets: report.TextOffsets
    ) -> Json:
        ids = [entry[0].token_id for entry in entries or ()]
        return {"text": text, "logprobs": self._logprobs(ids, entries, offsets)}

    def ending(self) -> Json:
        return {"text": "", "logprobs": None}

    def scores(self, requests: Sequence[Output]) -> Json:
        return {}

    def offsets(self, request: Output) -> report.TextOffsets:
        return report.TextOffsets(self.tokenizer, () if self.echoes else request.prompt_token_ids)

    def whole(self, output: Completion, request: Output) -> Json:
        offsets, scores = self.offsets(request), {}
        if self.num_scores is not None:
            values = report.prompt_logprobs(request, self.num_scores, self.tokenizer)
            scores = {"prompt_logprobs": values}
        if not self.echoes:
            return {**self.piece(output.text, output.logprobs, offsets), **scores}
        first = self._echo(request, offsets)
        rest = self.piece(output.text, output.logprobs, offsets)
        if first["logprobs"] is not None and rest["logprobs"] is not None:
            columns = rest["logprobs"].items()
            first["logprobs"] = {name: first["logprobs"][name] + more for name, more in columns}
        return {**first, "text": first["text"] + rest["text"], **scores}

    def _echo(self, request: Output, offsets: report.TextOffsets) -> Json:
        """The prompt as the first part of a text, with its log-probabilities."""
        ids, stream = request.prompt_token_ids, self.tokenizer.stream()
        text = "".join([*map(stream.push, ids), stream.finish()])
        has_logprobs = any(output.logprobs is not None for output in request.outputs)
        scores = request.prompt_logprobs if has_logprobs else None
        return {"text": text, "logprobs": self._logprobs(ids, scores, offsets)}

    def reader(self) -> AnswerReader | None:
        return None

    def _logprobs(
        self,
        token_ids: Sequence[int],
        entries: Sequence[report.Entry | None] | None,
        offsets: report.TextOffsets,
    ) -> Json | None:
        if entries is None:
            return None
        return report.completion_logprobs(token_ids, entries, self.top, self.tokenizer, offsets)


@dataclass
class _Progress:
    """The part of a choice that a stream has sent; ``frame`` makes its chunks of text alone."""

    offsets: report.TextOffsets
    frame: Frame
    reader: AnswerReader | None
    characters: int = 0
    tokens: int = 0
    ids: int = 0
    opened: bool = False
    begun: bool = False
    ended: bool = False


@dataclass(eq=False)
class Answer:
    """The answer to one API request, in one form.

    ``with_ids`` adds the token ids of the prompts and the outputs. With ``counts_along`` every
    chunk of a stream has the usage so far."""

    generation: Generation
    form: Form
    model: str
    include_usage: bool = False
    with_ids: bool = False
    counts_along: bool = False
    end = DONE
    created: int = field(default_factory=lambda: int(time.time()))
    _progress: dict[int, _Progress] = field(default_factory=dict)

    async def whole(self) -> Json:
        """The complete answer."""
        outputs = await self.generation.complete()
        choices = [
            {
                "index": self._index(number, output.index),
                "finish_reason": output.finish_reason,
                **self.form.whole(output, request),
                **self._ids(output.token_ids, request.prompt_token_ids),
            }
            for number, request in enumerate(outputs)
            for output in request.outputs
        ]
        header = self._header(self.form.whole_object)
        scores = self.form.scores(outputs)
        return {
            **header,
            "choices": choices,
            **scores,
            "usage": self._usage(),
            "looseleaf": self.generation.reuse_report(),
        }

    async def chunks(self) -> AsyncGenerator[list[Event], None]:
        """The answer as a stream of the events of each update.

        The first and the last chunk report the reuse."""
        is_first = True
        updates = self.generation.updates()
        async with aclosing(updates):
            async for number, request in updates:
                chunks: list[Event] = []
                for output in request.outputs:
                    chunks += self._new_chunks(number, output, request)
                if not chunks:
                    continue
                # text alone comes neither first nor last, so these are objects
                if is_first and len(self.generation.prompts) == 1 and isinstance(chunks[0], dict):
                    chunks[0]["looseleaf"] = self.generation.reuse_report()
                is_first = False
                if (
                    self.generation.finished
                    and not self.include_usage
                    and isinstance(chunks[-1], dict)
                ):
                    chunks[-1]["looseleaf"] = self.generation.reuse_report()
                yield chunks
        if self.include_usage:
            reuse = self.generation.reuse_report()
            last = {"choices": [], "usage": self._usage(), "looseleaf": reuse}
            yield [{**self._header(self.form.chunk_object), **last}]

    def failure(self, error: ApiError) -> list[Event]:
        """The last events of a stream that failed."""
        return [error.body]

    def _new_chunks(self, number: int, output: Completion, request: Output) -> list[Event]:
        index = self._index(number, output.index)
        progress = self._progress.get(index)
        if progress is None:
            progress = self._begin(index, request)
        if progress.ended:
            return []
        text, finish = output.text[progress.characters :], output.finish_reason
        has_reader = progress.reader is not None
        is_plain = output.logprobs is None and not (
            has_reader or self.with_ids or self.counts_along
        )
        if progress.begun and finish is None and is_plain:
            progress.characters += len(text)
            return [progress.frame.event(text)] if text else []
        contents: list[Json] = []
        entries = None if output.logprobs is None else output.logprobs[progress.tokens :]
        opening = None if progress.opened else self.form.opening(request, progress.offsets)
        if opening is not None:
            contents.append(opening)
        progress.opened = True
        if text or entries or (has_reader and finish is not None):
            contents += self._pieces(progress, text, entries, finish)
            progress.characters += len(text)
            progress.tokens += len(entries or ())
        if finish is not None:
            finish = _finish_reason(progress.reader, finish)
            progress.ended = True
            contents.append({**self.form.ending(), "finish_reason": finish})
        if contents:
            prompt = None if progress.begun else request.prompt_token_ids
            contents[0] |= self._ids(output.token_ids[progress.ids :], prompt)
            progress.ids = len(output.token_ids)
        progress.begun = progress.begun or bool(contents)
        return [self._chunk(index, content) for content in contents]

    def _ids(self, token_ids: Sequence[int], prompt: Sequence[int] | None) -> Json:
        """The token ids of a choice, if the request asks for them; those of ``prompt`` once."""
        if not self.with_ids:
            return {}
        ids = {"token_ids": [*token_ids]}
        return ids if prompt is None else {**ids, "prompt_token_ids": [*prompt]}

    def _pieces(
        self,
        progress: _Progress,
        text: str,
        entries: Sequence[report.Entry] | None,
        finish: str | None,
    ) -> list[Json]:
        """The new content: text, or the deltas of a reader."""
        reader = progress.reader
        piece = self.form.piece(text, entries, progress.offsets)
        if reader is None:
            return [piece]
        events = reader.feed(text)
        if finish is not None:
            events += reader.finish()
        deltas = reader.deltas(events) or ([{}] if entries else [])
        # log-probabilities are those of all deltas of this update
        return [{**piece, "delta": delta} for delta in deltas[:1]] + [
            {"delta": delta, "logprobs": None} for delta in deltas[1:]
        ]

    def _begin(self, index: int, request: Output) -> _Progress:
        """The state of a choice whose stream begins."""
        offsets = self.form.offsets(request)
        frame = Frame(lambda text: self._chunk(index, self.form.piece(text, None, offsets)))
        self._progress[index] = progress = _Progress(offsets, frame, self.form.reader())
        return progress

    def _chunk(self, index: int, content: Json) -> Json:
        choice = {"index": index, **content}
        choice.setdefault("finish_reason", None)
        usage: Json = {}
        if self.include_usage:
            usage["usage"] = self._usage() if self.counts_along else None
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


def _finish_reason(reader: AnswerReader | None, reason: str | None) -> str | None:
    return "tool_calls" if reader is not None and reader.has_calls and reason == "stop" else reason

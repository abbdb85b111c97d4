"""The synchronous API: a call takes prompts with documents and returns their outputs."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from difflib import get_close_matches
from itertools import count
from pathlib import Path
from typing import Any, Unpack, cast

from looseleaf.config import (
    CacheConfig,
    EngineConfig,
    Fuse,
    FuseSelector,
    IndexConfig,
    SchedulerConfig,
    TierConfig,
)
from looseleaf.engine.documents.entry import DocumentInfo
from looseleaf.engine.engine import Engine
from looseleaf.engine.lifetime import ForkGuardLock, ProcessBound
from looseleaf.engine.progress import RequestProgress
from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.engine.runner.runner import OnProgress
from looseleaf.engine.sampling.grammar import Compiled
from looseleaf.errors import InvalidOption, InvalidRequest
from looseleaf.index.host.segment import HostedSegment
from looseleaf.llm.load import load_engine
from looseleaf.llm.scoring import Score, ScoreOptions, score_of, score_requests
from looseleaf.prompt.request import (
    Document,
    Message,
    PolicyOptions,
    Prompt,
    PromptParts,
    Request,
    SystemPrompt,
    require_policies,
    sampling_per_prompt,
    tokenized,
    with_policies,
)
from looseleaf.sampling_params import SamplingParams

_SECTIONS = (EngineConfig, CacheConfig, SchedulerConfig, TierConfig)


class LLM(ProcessBound):
    """A model with its engine and its cache of segments.

    ``model`` is a folder, a GGUF file or a hub id. Two reference models ship with the package.
    ``looseleaf-reference``, the default, is for prompts up to about a thousand tokens.
    ``looseleaf-reference-causal`` is for longer prompts. Options are the fields of `EngineConfig`,
    `CacheConfig`, `SchedulerConfig` and `TierConfig`, as in ``LLM(num_pages=1000,
    dtype="float32")``. Raises ModelError for an unusable checkpoint, and InvalidOption for an
    option that is unknown or out of range.

        llm = LLM()
        handbook = Document(Path("handbook.txt").read_text())
        outputs = llm.generate([[handbook, "Who signs travel requests?"]])

    Every conversation begins with ``system_prompt``, which is computed here and stays in the cache.
    Methods are thread-safe, and requests of several threads share steps. Direct use of ``engine``
    is for one thread at a time. Forked processes, as by multiprocessing's ``fork``, must create
    their own LLM. Call `close` after use, or use ``with``.
    """

    def __init__(
        self, model: str | Path | None = None, *, system_prompt: str | None = None, **options: Any
    ) -> None:
        self.engine: Engine = load_engine(model, make_config(options))
        self._lock = ForkGuardLock()
        self._ids = count()
        self.system_prompt: SystemPrompt | None = None
        if system_prompt is not None:
            self.system_prompt = self.hold_system_prompt(system_prompt)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: str | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        salt: str = "",
        deadline: float | None = None,
        **policies: Unpack[PolicyOptions],
    ) -> list[RequestOutput]:
        """Complete raw prompts; returns an output for each, in order.

        A prompt is a string or a list of parts: strings, Documents and lists of token ids. A prompt
        that begins with token ids gets no BOS. No chat template is applied: use `chat` for instruct
        models. Requests with different ``salt`` share nothing. ``policies`` are the keywords of
        `Policies`. Raises InvalidRequest before anything runs, DeadlineExceeded after ``deadline``
        seconds, and EngineFault if the engine loses an answer."""
        require_policies("generate", policies)
        if not isinstance(prompts, Iterable):
            raise InvalidRequest(
                f"generate takes a prompt or a list of prompts, not {type(prompts).__name__}"
            )
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        for prompt in prompts:
            if isinstance(prompt, Document | int):
                raise InvalidRequest(
                    "generate takes a list of prompts: put the parts of one prompt into a list of "
                    "their own, as in llm.generate([[document, 'question']])"
                )
        parts = [self.engine.prompts.from_parts(prompt) for prompt in prompts]
        return self._run(parts, sampling_params, salt, deadline, policies)

    def score(
        self,
        prompts: str | Iterable[Prompt],
        continuations: str | Iterable[str | Sequence[int]],
        *,
        salt: str = "",
        deadline: float | None = None,
        fuse: Fuse | FuseSelector | None = None,
    ) -> list[Score]:
        """The log-probabilities of the tokens of a continuation after each prompt, in order.

        Prompts are as in `generate`. A continuation is a text or token ids, and is tokenized
        separately from its prompt. One prompt may have several continuations, as candidates of a
        choice. Scores do not depend on the cache. Nothing is generated. ``salt``, ``deadline``,
        ``fuse`` and errors as in `generate`; also InvalidRequest for an empty continuation and for
        other numbers of them."""
        options: ScoreOptions = {"salt": salt, "deadline": deadline, "fuse": fuse}
        requests = score_requests(
            self.engine.prompts, prompts, continuations, self._next_id, options
        )
        outputs = self._run_these(requests)
        pairs = zip(requests, outputs, strict=True)
        return [score_of(output, request.num_given) for request, output in pairs]

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        salt: str = "",
        deadline: float | None = None,
        system_prompt: SystemPrompt | None = None,
        **policies: Unpack[PolicyOptions],
    ) -> list[RequestOutput]:
        """Answer a conversation or a list of conversations, by the checkpoint's chat template.

        A message's content is a string or a list of strings, Documents and OpenAI content parts.
        ``system_prompt`` replaces the default system prompt. ``salt``, ``deadline``, ``policies``
        and errors as in `generate`."""
        require_policies("chat", policies)
        if not isinstance(conversations, Sequence):
            raise InvalidRequest(
                f"chat takes a list of messages, not {type(conversations).__name__}"
            )
        lists = [c for c in conversations if not isinstance(c, dict)]
        if lists and len(lists) != len(conversations):
            raise InvalidRequest(
                "chat takes one list of messages, or a list of such lists, not a mixture"
            )
        batch: Any = lists or [conversations]
        first = system_prompt or self.system_prompt
        parts = [self.engine.prompts.from_messages(c, first) for c in batch]
        return self._run(parts, sampling_params, salt, deadline, policies)

    def hold_system_prompt(self, text: str) -> SystemPrompt:
        """Compute a system prompt and keep it in the cache, for use in `chat`."""
        prompt = self.engine.prompts.system_prompt(text)
        with self._lock:
            progress = self.engine.hold(prompt)
        self._finish(progress)
        return prompt

    def register(
        self,
        document: Document,
        *,
        document_id: str | None = None,
        salt: str = "",
        system_prompt: SystemPrompt | None = None,
        system: str | None = None,
        pinned: bool = False,
    ) -> DocumentInfo:
        """Compute a document in advance and keep it under an id, as `Documents.register`.

        Its context is a conversation with ``system_prompt``, by default the LLM's, and the system
        text ``system``. So `chat` reuses it, and `generate` only with ``context="alone"``. Further
        methods for registered documents are in ``engine.documents``."""
        first = system_prompt or self.system_prompt
        parts = self.engine.prompts.from_document(document, first, system)
        documents = self.engine.documents
        with self._lock:
            info = documents.register(document, parts, document_id, salt, pinned=pinned)
        while info.state == "computing":
            with self._lock:
                self.engine.step()
                info = documents.stat(info.id, salt)
        error = documents.failure(info.id, salt)
        if error is not None:
            raise error
        return info

    def host(
        self,
        document: Document,
        *,
        index: IndexConfig | None = None,
        salt: str = "",
        system_prompt: SystemPrompt | None = None,
        system: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> HostedSegment:
        """Compute a document into host memory and index it, for ``select=Select("retrieval")``.

        It may be longer than the pool. It stays until ``engine.hosting.forget(segment.key)``. Its
        context is as in `register`, so use it with `chat`. ``on_progress(stage, completed, total)``
        may run in any thread. Later calls continue the work of an interrupted call. Another index
        replaces the first.

        Raises InvalidOption for an ``index`` of another type, and the errors of the computation.
        Raises InvalidRequest if the document exceeds the model's context or is deleted during the
        call. Also if the model's scores are not plain inner products."""
        first = system_prompt or self.system_prompt
        parts = self.engine.prompts.from_document(document, first, system)
        if not isinstance(index, IndexConfig | None):
            raise InvalidOption(f"an index is an IndexConfig, not {type(index).__name__}")
        hosting = self.engine.hosting
        with self._lock:
            job = hosting.add(parts, salt, index or IndexConfig(), on_progress)
        try:
            while job.stage == "computing":
                with self._lock:
                    self.engine.step()
            job.finished.wait()
        except BaseException:
            job.num_callers -= 1
            raise
        if job.error is not None:
            raise job.error
        if job.stage == "forgotten":
            raise InvalidRequest("the document was deleted while it was hosted: host it again")
        return job.segment

    def stream(
        self,
        prompt: Prompt | PromptParts,
        sampling_params: SamplingParams | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
        *,
        salt: str = "",
        deadline: float | None = None,
        **policies: Unpack[PolicyOptions],
    ) -> Iterator[RequestOutput]:
        """The growing output of a prompt, step by step.

        The prompt is as in `generate`, for example ``llm.stream([document, "Who?"])``. A
        conversation needs ``engine.prompts.from_messages``. ``on_prefill(computed, total)`` reports
        prompt tokens at the start, and after each step until the first output token. ``salt``,
        ``deadline``, ``policies`` and errors as in `generate`."""
        require_policies("stream", policies)
        parts = tokenized(prompt) or self.engine.prompts.from_parts(cast(Prompt, prompt))
        params = SamplingParams() if sampling_params is None else sampling_params
        request = Request(self._next_id(), parts, params, salt, deadline)
        return self._stream(with_policies(request, **policies), on_prefill)

    def _stream(
        self, request: Request, on_prefill: Callable[[int, int], None] | None
    ) -> Iterator[RequestOutput]:
        _grammars = self._compile([request.params], request.salt, request.deadline)
        with self._lock:
            progress = self.engine.add(request)
        sequence = progress.outputs[0].sequence
        try:
            if on_prefill is not None:
                on_prefill(sequence.num_computed, sequence.num_tokens)
            finished = False
            while not finished:
                with self._lock:
                    # a step of another thread may finish the request
                    changed = [progress] if progress.finished else self.engine.step()
                if progress.error is not None:
                    raise progress.error
                if progress in changed:
                    finished = progress.finished
                    yield progress.output()
                elif on_prefill is not None:
                    on_prefill(sequence.num_computed, sequence.num_tokens)
        finally:
            with self._lock:
                self.engine.abort(progress.request.request_id)

    def close(self) -> None:
        """Complete writes to tiers and close them; also runs at exit.

        Without tiers it also frees a GPU's pages. Weights stay while this object exists. Call no
        other method afterwards. Has no effect in a forked process."""
        if self._lock.guard.is_owner:
            with self._lock:
                self.engine.close()

    def _run(
        self,
        prompts: Sequence[PromptParts],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        salt: str,
        deadline: float | None,
        policies: PolicyOptions,
    ) -> list[RequestOutput]:
        all_params = sampling_per_prompt(sampling_params, len(prompts))
        requests = [
            with_policies(Request(self._next_id(), parts, params, salt, deadline), **policies)
            for parts, params in zip(prompts, all_params, strict=True)
        ]
        # outside the lock, so other threads can step; the references keep the cache entries
        _grammars = self._compile(all_params, salt, deadline)
        return self._run_these(requests)

    def _run_these(self, requests: Sequence[Request]) -> list[RequestOutput]:
        accepted: list[RequestProgress] = []
        try:
            for request in requests:
                with self._lock:
                    accepted.append(self.engine.add(request))
            self._finish(*accepted)
        finally:
            # after an error or an interrupt no request of this call may remain
            for progress in accepted:
                with self._lock:
                    self.engine.abort(progress.request.request_id)
        return [progress.output() for progress in accepted]

    def _compile(
        self, all_params: Sequence[SamplingParams], salt: str, deadline: float | None
    ) -> list[Compiled]:
        due = math.inf if deadline is None else time.monotonic() + deadline
        grammars = [params.grammar for params in all_params if params.grammar is not None]
        return [self.engine.grammars.compile(grammar, salt, due) for grammar in grammars]

    def _finish(self, *requests: RequestProgress) -> None:
        """Step until all ``requests`` end. Raises the first error of a request."""
        while True:
            with self._lock:
                for error in (progress.error for progress in requests):
                    if error is not None:
                        raise error
                # a step of another thread may finish them
                if all(progress.finished for progress in requests) or not self.engine.has_work:
                    return
                self.engine.step()

    def _next_id(self) -> str:
        return f"llm-{next(self._ids)}"


def make_config(options: dict[str, Any]) -> EngineConfig:
    """An `EngineConfig` from flat options. Raises InvalidOption for an unknown name."""
    names: dict[type, set[str]] = {
        section: {field.name for field in fields(section)} for section in _SECTIONS
    }
    known = set().union(*names.values()) - {"cache", "scheduler", "tiers"}
    unknown = sorted(set(options) - known)
    if unknown:
        matches = get_close_matches(unknown[0], known, 1)
        guess = f"did you mean {matches[0]}? " if matches else ""
        raise InvalidOption(
            f"unknown option {unknown[0]!r}: {guess}the options are {', '.join(sorted(known))}"
        )

    def options_of(section: type) -> dict[str, Any]:
        return {name: value for name, value in options.items() if name in names[section]}

    return EngineConfig(
        **options_of(EngineConfig),
        cache=CacheConfig(**options_of(CacheConfig)),
        scheduler=SchedulerConfig(**options_of(SchedulerConfig)),
        tiers=TierConfig(**options_of(TierConfig)),
    )

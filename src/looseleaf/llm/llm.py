"""The offline face: prompts with documents in, answers out, in one call."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Any, Unpack, cast

from looseleaf.config import CacheConfig, EngineConfig, IndexConfig, SchedulerConfig, TierConfig
from looseleaf.engine.documents.entry import DocumentInfo
from looseleaf.engine.engine import Engine
from looseleaf.engine.fork_guard import HomeLock, OfOneProcess
from looseleaf.engine.progress import RequestProgress
from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.engine.runner.runner import OnProgress
from looseleaf.engine.sampling.grammar import CompiledGrammar
from looseleaf.errors import InvalidOption, InvalidRequest
from looseleaf.kv.hosted import HostedSegment
from looseleaf.llm.load import load_engine
from looseleaf.prompt.options import require_policies, sampling_of_each
from looseleaf.prompt.request import (
    Document,
    GivenPolicies,
    Message,
    Prompt,
    PromptParts,
    Request,
    SystemPrompt,
    tokenized,
    with_policies,
)
from looseleaf.sampling_params import SamplingParams

_SECTIONS = (EngineConfig, CacheConfig, SchedulerConfig, TierConfig)


class LLM(OfOneProcess):
    """A model with its engine and its cache of segments.

    ``model`` is a folder or a hub id. Two reference models ship with the package:
    ``looseleaf-reference``, which None stands for, for prompts up to about a thousand tokens, and
    ``looseleaf-reference-causal`` for longer prompts.
    Options are the fields of `EngineConfig`, `CacheConfig`, `SchedulerConfig` and `TierConfig`: as
    in ``LLM(num_pages=1000, max_num_seqs=16, dtype="float32")``. Raises ModelError for a checkpoint
    that can't be used and InvalidOption for an option that is unknown or out of range.

        llm = LLM()
        handbook = Document(Path("handbook.txt").read_text())
        outputs = llm.generate([[handbook, "Who signs travel requests?"]])

    ``system_prompt`` stands before every conversation; it is computed here and stays in the cache.
    It may be asked from several threads, whose requests then share steps; what is done with its
    ``engine`` directly is for one thread at a time. It belongs to its process: one that is forked
    later, as by multiprocessing's ``fork``, makes its own. `close` it when done, or use ``with``.
    """

    def __init__(
        self, model: str | Path | None = None, *, system_prompt: str | None = None, **options: Any
    ) -> None:
        self.engine: Engine = load_engine(model, make_config(options))
        self._lock = HomeLock()
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
        **policies: Unpack[GivenPolicies],
    ) -> list[RequestOutput]:
        """Complete raw prompts, one output each, in order.

        A prompt is a string or a list of parts (strings, Documents, lists of token ids, before
        which no BOS is put). No chat template is applied: use `chat` for instruct models. What has
        one ``salt`` shares nothing with what has another. ``policies`` are by name: ``fuse``, which
        tokens of reused documents are computed again, ``select``, which keys decoding reads, and
        ``revise``, which earlier rows profit from that. Raises InvalidRequest before anything runs,
        DeadlineExceeded if an answer takes more than ``deadline`` seconds, EngineFault if it was
        lost."""
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

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        salt: str = "",
        deadline: float | None = None,
        system_prompt: SystemPrompt | None = None,
        **policies: Unpack[GivenPolicies],
    ) -> list[RequestOutput]:
        """Answer one conversation or several, by the checkpoint's chat template.

        A message's content is a string or a list of strings, Documents and OpenAI content parts.
        ``system_prompt`` takes the place of the one that all conversations have. ``salt``,
        ``deadline``, ``policies`` and errors as in `generate`."""
        require_policies("chat", policies)
        if not isinstance(conversations, Sequence):
            raise InvalidRequest(
                f"chat takes a list of messages, not {type(conversations).__name__}"
            )
        several = [c for c in conversations if not isinstance(c, dict)]
        if several and len(several) != len(conversations):
            raise InvalidRequest(
                "chat takes one list of messages, or a list of such lists, not a mixture"
            )
        batch: Any = several or [conversations]
        first = system_prompt or self.system_prompt
        parts = [self.engine.prompts.from_messages(c, first) for c in batch]
        return self._run(parts, sampling_params, salt, deadline, policies)

    def hold_system_prompt(self, text: str) -> SystemPrompt:
        """Compute a system prompt and keep it in the cache, for use in `chat`."""
        prompt = self.engine.prompts.system_prompt(text)
        with self._lock:
            held = self.engine.hold(prompt)
        self._finish(held)
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
        """Compute a document ahead and keep it under an id, as `Documents.register` says.

        Its context is that of a conversation under ``system_prompt``, by default the one that all
        have, whose own system text is ``system``: so it is found by `chat`, and by `generate` only
        as ``Document(text, context="alone")``. What else can be done with registered documents
        is in ``engine.documents``."""
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
        """Compute a document into the host's memory and index it, for requests with
        ``select=Select("retrieval")``. It may be longer than the pool, and is kept until
        ``engine.hosting.forget(segment.key)``.

        Its context is as in `register`, so ask about it with `chat`. ``on_progress`` hears a stage,
        how much is done and of how much, from any thread. Raises InvalidOption for an index that is
        none, InvalidRequest for a document longer than the positions that the model reads, a model
        whose scores are not plain inner products or a document that is deleted meanwhile, and what
        ended the work. An interrupted call's document goes on to be hosted in later ones; to host
        it with another index takes its place."""
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
            job.asked -= 1
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
        **policies: Unpack[GivenPolicies],
    ) -> Iterator[RequestOutput]:
        """The growing output of one prompt, step by step.

        The prompt is what `generate` takes a list of, as in ``llm.stream([document, "Who?"])``, or
        one that ``engine.prompts`` made, of a conversation with ``from_messages``. ``on_prefill``
        hears how many prompt tokens are done, and of how many, until the first token is there.
        ``salt``, ``deadline``, ``policies`` and errors as in `generate`."""
        require_policies("stream", policies)
        parts = tokenized(prompt) or self.engine.prompts.from_parts(cast(Prompt, prompt))
        params = SamplingParams() if sampling_params is None else sampling_params
        request = Request(self._next_id(), parts, params, salt, deadline)
        return self._stream(with_policies(request, **policies), on_prefill)

    def _stream(
        self, request: Request, on_prefill: Callable[[int, int], None] | None
    ) -> Iterator[RequestOutput]:
        _held = self._compile([request.params], request.salt, request.deadline)
        with self._lock:
            progress = self.engine.add(request)
        sequence = progress.outputs[0].sequence
        try:
            told = False
            while not told:
                with self._lock:
                    # another call on this engine may have finished the request in the meantime
                    changed = [progress] if progress.finished else self.engine.step()
                if progress.error is not None:
                    raise progress.error
                if progress in changed:
                    told = progress.finished
                    yield progress.output()
                elif on_prefill is not None:
                    on_prefill(sequence.num_computed, sequence.num_tokens)
        finally:
            with self._lock:
                self.engine.abort(progress.request.request_id)

    def close(self) -> None:
        """Finish what is on its way to the tiers, and let go of them; at exit that happens anyway.
        Without tiers a GPU's pages are given back, too; else they stay, as the weights do, for as
        long as this object is held.

        Nothing may be asked after. In a forked process it does nothing."""
        if self._lock.home.is_here:
            with self._lock:
                self.engine.close()

    def _run(
        self,
        prompts: Sequence[PromptParts],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        salt: str,
        deadline: float | None,
        policies: GivenPolicies,
    ) -> list[RequestOutput]:
        each = sampling_of_each(sampling_params, len(prompts))
        # before the lock, and held until the engine has them: other threads step meanwhile
        _held = self._compile(each, salt, deadline)
        added = []
        try:
            for parts, one in zip(prompts, each, strict=True):
                request = Request(self._next_id(), parts, one, salt, deadline)
                with self._lock:
                    added.append(self.engine.add(with_policies(request, **policies)))
            self._finish(*added)
        finally:
            # after an error or an interrupt nothing of this call may stay behind
            for progress in added:
                with self._lock:
                    self.engine.abort(progress.request.request_id)
        return [progress.output() for progress in added]

    def _compile(
        self, each: Sequence[SamplingParams], salt: str, deadline: float | None
    ) -> list[CompiledGrammar]:
        due = math.inf if deadline is None else time.monotonic() + deadline
        given = [one.grammar for one in each if one.grammar is not None]
        return [self.engine.grammars.compile(one, salt, due) for one in given]

    def _finish(self, *added: RequestProgress) -> None:
        """Step until these have ended; raises the error of the first that fails."""
        while True:
            with self._lock:
                for error in (progress.error for progress in added):
                    if error is not None:
                        raise error
                # a step of another thread may have finished them in the meantime
                if all(progress.finished for progress in added) or not self.engine.has_work:
                    return
                self.engine.step()

    def _next_id(self) -> str:
        return f"llm-{next(self._ids)}"


def make_config(options: dict[str, Any]) -> EngineConfig:
    """An `EngineConfig` from flat options; raises InvalidOption for a name that no section has."""
    names: dict[type, set[str]] = {
        section: {field.name for field in fields(section)} for section in _SECTIONS
    }
    known = set().union(*names.values()) - {"cache", "scheduler", "tiers"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise InvalidOption(
            f"unknown option {unknown[0]!r}: the options are {', '.join(sorted(known))}"
        )

    def chosen(section: type) -> dict[str, Any]:
        return {name: value for name, value in options.items() if name in names[section]}

    return EngineConfig(
        **chosen(EngineConfig),
        cache=CacheConfig(**chosen(CacheConfig)),
        scheduler=SchedulerConfig(**chosen(SchedulerConfig)),
        tiers=TierConfig(**chosen(TierConfig)),
    )

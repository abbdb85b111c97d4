"""The engine: requests in, steps, outputs. It knows no HTTP, no threads and no process model.

`step` may be driven by anybody: a loop, a thread, somebody else's scheduler. Between two steps
requests can be added and aborted."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import count

from torch import Tensor

from looseleaf.config import EngineConfig
from looseleaf.engine.admission import Admission
from looseleaf.engine.progress import OutputProgress, RequestProgress
from looseleaf.engine.prompt import PromptBuilder
from looseleaf.engine.request import Request
from looseleaf.engine.rows import Arrival, awaited_token, logit_sequences
from looseleaf.engine.runner import Runner
from looseleaf.engine.sampling import (
    SampledTokens,
    Sampler,
    SamplingBatch,
    SamplingState,
    StopChecker,
    TokenLogprob,
)
from looseleaf.engine.scheduler import Scheduler, StepWork
from looseleaf.engine.sequence import Phase, Sequence
from looseleaf.errors import InvalidRequest, PoolTooSmall, PromptTooLong
from looseleaf.kv.keys import KeySpace
from looseleaf.kv.store import SegmentStore, StoreCounters
from looseleaf.models.tokenizer import Tokenizer


@dataclass
class EngineCounters:
    """Sums since the engine was made. The store counts hits and evictions, the attention groups."""

    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True)
class EngineParts:
    """What an engine is put together from."""

    config: EngineConfig
    runner: Runner
    tokenizer: Tokenizer
    keys: KeySpace
    max_model_len: int


@dataclass(eq=False)
class _Batch:
    """The sampling batch of the outputs that made it, kept while the same rows decode."""

    outputs: list[OutputProgress] = field(default_factory=list)
    sampling: SamplingBatch | None = None


@dataclass(frozen=True)
class _Launched:
    """A step that the device computes or has computed, and the tokens that it yields.

    ``sampled`` and ``arrival`` are None if no output gets a token.
    """

    work: StepWork
    outputs: list[OutputProgress]
    sampled: SampledTokens | None
    arrival: Arrival | None


class Engine:
    """Runs requests over one model. Not thread-safe: one caller at a time.

    On a GPU it runs one step ahead of its own eyes: the next step is planned and launched before
    the tokens of the last one have arrived, and reads them on the device. An output that turns out
    to have ended is computed once in vain.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.config = parts.config
        self.tokenizer = parts.tokenizer
        self.max_model_len = parts.max_model_len
        self.runner = parts.runner
        self.store = SegmentStore(parts.runner.pool)
        self.counters = EngineCounters()
        self.prompts = PromptBuilder(parts.tokenizer, parts.runner.model.config.vocab_size)
        self._admission = Admission(self.store, parts.keys, parts.config.cache.prefix_caching)
        budget = parts.config.batched_tokens(parts.runner.model.device.type == "cuda")
        self._scheduler = Scheduler(parts.config.scheduler, self._admission, budget)
        self._sampler = Sampler()
        self._requests: dict[str, RequestProgress] = {}
        self._outputs: dict[Sequence, OutputProgress] = {}
        self._numbers = count()
        self._batch = _Batch()
        self._ahead: _Launched | None = None

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self._scheduler.has_work

    def knows(self, request_id: str) -> bool:
        """Whether the request was added and has not ended."""
        return request_id in self._requests

    @property
    def store_counters(self) -> StoreCounters:
        """Hits, misses and evictions of the segment store."""
        return self.store.counters

    def add(self, request: Request) -> RequestProgress:
        """Queue a request. Raises InvalidRequest (and its kin) if it can never be served."""
        if request.request_id in self._requests:
            raise InvalidRequest(f"request id {request.request_id!r} is in use: choose another one")
        room = self.max_model_len - request.num_tokens
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {request.num_tokens} tokens, but the context holds "
                f"{self.max_model_len}, at least one of them for the answer: shorten the documents "
                "or raise max_model_len"
            )
        params = request.params
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        progress = RequestProgress(request)
        number = next(self._numbers)
        for index in range(params.n):
            sequence = Sequence(
                request.request_id,
                index,
                request.parts,
                self._admission.keys,
                self._admission.page_size,
            )
            limit = self._fitting(sequence, max_tokens, explicit=params.max_tokens is not None)
            sampling = SamplingState(
                params,
                request.token_ids,
                vocab_size=self.runner.model.config.vocab_size,
                eos_token_ids=() if params.ignore_eos else self.tokenizer.eos_token_ids,
                child=index,
                seed=self.config.seed + number,
            )
            stop = StopChecker(params, max_tokens=limit, eos_token_ids=self.tokenizer.eos_token_ids)
            stream = self.tokenizer.stream(params.skip_special_tokens)
            progress.outputs.append(OutputProgress(progress, sequence, sampling, stop, stream))
        self._requests[request.request_id] = progress
        for output in progress.outputs:
            self._outputs[output.sequence] = output
            self._scheduler.add(output.sequence)
        return progress

    def abort(self, request_id: str) -> None:
        """End a request and free all that it holds; an unknown id, or one that has ended, is no
        error.
        """
        progress = self._requests.pop(request_id, None)
        for output in progress.outputs if progress else ():
            if not output.finished:
                output.stop.close("abort")
                self._retire(output)

    def step(self) -> list[RequestProgress]:
        """Schedule, compute, sample. Returns the requests that have new tokens or have ended."""
        changed: list[RequestProgress] = []
        launched = self._take_ahead()
        if launched is None:
            work = self._scheduler.schedule()
            self._book_admissions(work)
            changed = [self._refuse(sequence) for sequence in work.refused]
            if work.empty:
                return changed
            launched = self._launch(work)
        self._scheduler.complete(launched.work)
        if self.runner.runs_ahead:
            self._ahead = self._launch_ahead(launched)
        return changed + self._collect(launched)

    def _launch(self, work: StepWork, previous: Tensor | None = None) -> _Launched:
        """Compute a step and sample from it. ``previous`` has the tokens that are yet to arrive."""
        try:
            logits = self.runner.run(work, previous)
        except Exception:
            # nothing of the step is booked: its requests end, and their pages come back
            for sequence in {*work.decode, *(chunk.sequence for chunk in work.chunks)}:
                self.abort(sequence.request_id)
            raise
        self.counters.steps += 1
        self.counters.prompt_tokens += sum(chunk.stop - chunk.start for chunk in work.chunks)
        outputs = [self._outputs[sequence] for sequence in logit_sequences(work)]
        if not outputs:
            return _Launched(work, outputs, None, None)
        sampled = self._sampler.sample(logits, self._sampling_batch(outputs))
        return _Launched(work, outputs, sampled, Arrival.of(sampled.token_ids))

    def _launch_ahead(self, launched: _Launched) -> _Launched | None:
        """Launch the step behind ``launched``, if it can be told without the tokens of that one."""
        yielding = [(row, o) for row, o in enumerate(launched.outputs) if not o.finished]
        # an output that reaches its length now has no next step
        going_on = {o.sequence: row for row, o in yielding if not o.stop.ends_with_next}
        for sequence, row in going_on.items():
            sequence.append(awaited_token(row))
        try:
            work = self._scheduler.schedule_ahead({o.sequence for _, o in yielding} - {*going_on})
            if work is None:
                return None
            self._book_admissions(work)
            previous = launched.sampled.token_ids if launched.sampled is not None else None
            return self._launch(work, previous)
        finally:
            for sequence in going_on:
                sequence.drop_awaited()

    def _take_ahead(self) -> _Launched | None:
        """The step that was launched ahead, less what has ended since; None if nothing is left."""
        launched, self._ahead = self._ahead, None
        if launched is None:
            return None
        work = launched.work
        decode = [s for s in work.decode if s.phase is not Phase.FINISHED]
        chunks = [c for c in work.chunks if c.sequence.phase is not Phase.FINISHED]
        if not decode and not chunks:
            return None
        return replace(launched, work=replace(work, decode=decode, chunks=chunks))

    def _collect(self, launched: _Launched) -> list[RequestProgress]:
        """Hand the tokens of a step to its outputs, except those that have ended before it."""
        if launched.sampled is None or launched.arrival is None:
            return []
        taking = [(row, o) for row, o in enumerate(launched.outputs) if not o.finished]
        tokens = launched.arrival.wait()
        for row, output in taking:
            self._take(output, tokens[row], launched.sampled.logprobs.get(row))
        return list(dict.fromkeys(output.request for _, output in taking))

    def check(self) -> None:
        """Raise IntegrityError unless every page of the pool is accounted for. For tests, between
        steps.
        """
        private = [
            page
            for sequence in self._scheduler.running
            for run in sequence.runs
            for page, segment in zip(run.pages, run.segments, strict=True)
            if segment is None
        ]
        self.store.check(private)

    def _fitting(self, sequence: Sequence, max_tokens: int, *, explicit: bool) -> int:
        """The most output tokens that the pool has room for; raises PoolTooSmall if it is too
        few.
        """
        total = self.store.pool.num_pages
        least = self._admission.pages_needed(sequence, 1)
        most = self._admission.pages_needed(sequence, max_tokens)
        wanted = most if explicit else least
        if wanted > total:
            page_size = self._admission.page_size
            raise PoolTooSmall(
                f"the request needs {wanted} pages of {page_size} tokens for "
                f"{sequence.num_prompt_tokens} prompt tokens and its answer, but the pool has "
                f"{total}: enlarge the cache, shorten the documents or lower max_tokens"
            )
        if most <= total:
            return max_tokens
        tail = sequence.tail.num_tokens
        others = self._admission.pages_needed(sequence, 0) - self._admission.pages_for(tail)
        return (total - others) * self._admission.page_size - tail

    def _sampling_batch(self, outputs: list[OutputProgress]) -> SamplingBatch:
        if self._batch.sampling is None or self._batch.outputs != outputs:
            states = [output.sampling for output in outputs]
            self._batch = _Batch(outputs, SamplingBatch(states, device=self.runner.model.device))
        assert self._batch.sampling is not None
        return self._batch.sampling

    def _take(
        self, output: OutputProgress, token: int, logprobs: tuple[TokenLogprob, ...] | None
    ) -> None:
        output.push(token, logprobs)
        output.request.mark_token()
        self.counters.output_tokens += 1
        if output.finished:
            self._retire(output)

    def _retire(self, output: OutputProgress) -> None:
        self._scheduler.remove(output.sequence)
        del self._outputs[output.sequence]
        if output.request.finished:
            output.request.mark_finished()
            self._requests.pop(output.request.request.request_id, None)

    def _refuse(self, sequence: Sequence) -> RequestProgress:
        """End a request that cannot be admitted though nobody else runs."""
        progress = self._outputs[sequence].request
        progress.error = PoolTooSmall(
            f"the pool of {self.store.pool.num_pages} pages has too few left beside its pinned "
            "segments: unpin some or enlarge the cache"
        )
        self.abort(progress.request.request_id)
        return progress

    def _book_admissions(self, work: StepWork) -> None:
        self.counters.preemptions += len(work.preempted)
        for sequence, report in work.admitted:
            output = self._outputs[sequence]
            output.request.mark_admitted()
            if output.reuse is None:
                output.reuse = report
            else:
                again = (
                    report.text_tokens - report.text_tokens_cached + report.document_tokens_computed
                )
                output.request.preempted_tokens += again


def drain(engine: Engine) -> Iterable[RequestProgress]:
    """Step until nothing is left to do, yielding each request when it ends.

    Raises the error of a request that could not be served.
    """
    while engine.has_work:
        for progress in engine.step():
            if progress.error is not None:
                raise progress.error
            if progress.finished:
                yield progress

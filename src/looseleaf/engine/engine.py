"""The engine: requests in, steps, outputs. It knows no HTTP, no threads and no process model.

`step` may be driven by anybody: a loop, a thread, somebody else's scheduler. Between two steps
requests can be added and aborted."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count

from torch import Tensor

from looseleaf.config import EngineConfig
from looseleaf.engine.admission import Admission
from looseleaf.engine.documents import Documents
from looseleaf.engine.grammar import GrammarCompiler
from looseleaf.engine.intake import Intake
from looseleaf.engine.progress import OutputProgress, RequestProgress
from looseleaf.engine.prompt import PromptBuilder
from looseleaf.engine.request import PromptParts, Request, SystemPrompt, TextPart
from looseleaf.engine.runner import Runner, logit_sequences
from looseleaf.engine.sampling import (
    Sampler,
    SamplingBatch,
    TokenLogprob,
)
from looseleaf.engine.scheduler import Scheduler, StepWork
from looseleaf.engine.sequence import Sequence
from looseleaf.engine.stats import EngineCounters, EngineSnapshot, SharedKeys, StepStats
from looseleaf.errors import (
    DeadlineExceeded,
    EngineFault,
    InvalidOption,
    InvalidRequest,
    LooseleafError,
    PoolTooSmall,
)
from looseleaf.kv.keys import KeySpace
from looseleaf.kv.store import SegmentStore
from looseleaf.models.tokenizer import Tokenizer
from looseleaf.sampling_params import SamplingParams

Ended = Callable[[RequestProgress], None]


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


class Engine:
    """Runs requests over one model. Not thread-safe: one caller at a time."""

    def __init__(self, parts: EngineParts) -> None:
        self.config = parts.config
        self.tokenizer = parts.tokenizer
        self.max_model_len = parts.max_model_len
        self.runner = parts.runner
        self.store = SegmentStore(parts.runner.pool)
        self.counters = EngineCounters()
        self.last_step: StepStats | None = None
        vocab_size = parts.runner.model.config.vocab_size
        self.prompts = PromptBuilder(parts.tokenizer, vocab_size)
        self.grammars = GrammarCompiler(parts.tokenizer, vocab_size)
        self.documents = Documents(self.store, parts.keys, self.warm, self.abort)
        self._admission = Admission(self.store, parts.keys, parts.config.cache.prefix_caching)
        self._intake = Intake(parts.tokenizer, self.grammars, self._admission, parts.max_model_len)
        self._scheduler = Scheduler(parts.config.scheduler, self._admission)
        self._sampler = Sampler()
        self._requests: dict[str, RequestProgress] = {}
        self._outputs: dict[Sequence, OutputProgress] = {}
        self._warming: dict[str, Ended] = {}
        # (when, number, request), the first to end in front
        self._deadlines: list[tuple[float, str]] = []
        self._numbers, self._warm_numbers = count(), count()
        self._batch = _Batch()
        self._shared_keys = SharedKeys(self._admission.page_size)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self._scheduler.has_work

    def knows(self, request_id: str) -> bool:
        """Whether the request was added and has not ended."""
        return request_id in self._requests

    def snapshot(self) -> EngineSnapshot:
        """The engine between two steps, in numbers; costs the same however much is stored."""
        evicted = self.store.counters
        return EngineSnapshot(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            pages=self.store.page_counts,
            segments=len(self.store),
            registered_documents=len(self.documents),
            evicted_segments=evicted.evicted_segments,
            evicted_pages=evicted.evicted_pages,
            counters=replace(self.counters),
        )

    def add(self, request: Request, arrived: float | None = None) -> RequestProgress:
        """Queue a request, which arrived now or at ``arrived`` on the clock `time.perf_counter`.

        Raises InvalidRequest (and its kin) if it can never be served."""
        if request.request_id in self._requests:
            raise InvalidRequest(f"request id {request.request_id!r} is in use: choose another one")
        number = next(self._warm_numbers if request.warms else self._numbers)
        progress = self._intake.take(request, self.config.seed + number)
        if arrived is not None:
            progress.arrived = arrived
        self._requests[request.request_id] = progress
        self.counters.requests += not request.warms
        for output in progress.outputs:
            self._outputs[output.sequence] = output
            self._scheduler.add(output.sequence)
        if request.deadline is not None:
            # names only: a request that ends before its deadline must not be kept until then
            heappush(self._deadlines, (progress.due, request.request_id))
        return progress

    def warm(
        self, parts: PromptParts, salt: str = "", ended: Ended = lambda _: None
    ) -> RequestProgress:
        """Have a prompt computed without an answer: its documents, or its text if it has none.

        The last of ``parts`` is empty text. ``ended`` is called when that is done or has failed,
        while the segments are still held. Raises as `add` does."""
        name = f"(warm {next(self._warm_numbers)})"
        progress = self.add(Request(name, parts, SamplingParams(max_tokens=1), salt, warms=True))
        self._warming[name] = ended
        return progress

    def hold(self, prompt: SystemPrompt) -> RequestProgress:
        """Compute the pages of a service's system prompt and pin them, for all salts.

        Raises InvalidOption without prefix caching, and what `add` raises."""
        if not self.config.cache.prefix_caching:
            raise InvalidOption(
                "a system prompt is held in the prefix cache: leave prefix_caching on"
            )

        def pin(progress: RequestProgress) -> None:
            if progress.error is not None:
                return
            sequence = progress.outputs[0].sequence
            run = sequence.runs[0]
            for page in range(run.computed // self._admission.page_size):
                key = run.page_key(page, sequence.keys, self._admission.page_size)
                segment = self.store.find(key)
                assert segment is not None, "a page that was computed is published"
                self.store.pin(segment)

        return self.warm((TextPart(prompt.tokens, len(prompt.tokens)), TextPart(())), "", pin)

    def abort(self, request_id: str) -> None:
        """End a request and free all that it holds; an unknown id, or one that has ended, is no
        error.
        """
        progress = self._requests.get(request_id)
        for output in progress.outputs if progress else ():
            if not output.finished:
                output.stop.close("abort")
                self._retire(output)

    def step(self) -> list[RequestProgress]:
        """Schedule, compute, sample. Returns the requests that have new tokens or have ended.

        A fault on the way ends the requests it concerns, each with its ``error``, and no other."""
        begun = time.perf_counter()
        plan = self.runner.attention.counters
        before = replace(plan)
        changed = self._expire(begun)
        try:
            work = self._scheduler.schedule()
        except Exception as error:
            # nobody knows how far it came: all that is booked is taken back
            return changed + self._fail(self._requests.values(), error)
        changed += [self._refuse(sequence) for sequence in work.refused]
        if not work.empty or work.admitted:
            changed += self._compute(work)
        if self._warming:
            changed += self._end_warm()
        self.last_step = StepStats(
            time.perf_counter() - begun,
            sum(chunk.stop - chunk.start for chunk in work.chunks),
            len(work.decode),
            plan.items - before.items,
            plan.grouped_items - before.grouped_items,
            plan.grouped_rows - before.grouped_rows,
        )
        return list(dict.fromkeys(changed))

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

    def _sampling_batch(self, outputs: list[OutputProgress]) -> SamplingBatch:
        if self._batch.sampling is None or self._batch.outputs != outputs:
            states = [output.sampling for output in outputs]
            self._batch = _Batch(outputs, SamplingBatch(states, device=self.runner.model.device))
        assert self._batch.sampling is not None
        return self._batch.sampling

    def _compute(self, work: StepWork) -> list[RequestProgress]:
        try:
            self._book_admissions(work)
            if work.empty:
                return []
            logits = self.runner.run(work)
            self._scheduler.complete(work)
        except Exception as error:
            sequences = [*work.decode, *(chunk.sequence for chunk in work.chunks)]
            return self._fail([self._outputs[s].request for s in sequences], error)
        self._book_step(work)
        outputs = [self._outputs[sequence] for sequence in logit_sequences(work)]
        if outputs:
            self._draw(outputs, logits)
        return [output.request for output in outputs]

    def _draw(self, outputs: list[OutputProgress], logits: Tensor) -> None:
        """The next token of every output; where that fails, its request ends alone."""
        try:
            sampled = self._sampler.sample(logits, self._sampling_batch(outputs))
        except Exception as error:
            self._batch = _Batch()
            if len(outputs) == 1:
                self._fail([outputs[0].request], error)
            else:
                # one by one, to see whose fault it was; so far no state has changed
                for row, output in enumerate(outputs):
                    if not output.finished:
                        self._draw([output], logits[row : row + 1])
            return
        tokens = sampled.token_ids.tolist()
        for row, (output, token) in enumerate(zip(outputs, tokens, strict=True)):
            # a sibling's fault may have ended it
            if not output.finished:
                self._take(output, token, sampled.logprobs.get(row))

    def _take(
        self, output: OutputProgress, token: int, logprobs: tuple[TokenLogprob, ...] | None
    ) -> None:
        try:
            output.push(token, logprobs)
        except Exception as error:
            self._fail([output.request], error)
            return
        output.request.mark_token()
        self.counters.output_tokens += 1
        if output.finished:
            self._retire(output)

    def _fail(self, requests: Iterable[RequestProgress], error: Exception) -> list[RequestProgress]:
        """End requests with ``error``."""
        ended = list(dict.fromkeys(requests))
        for progress in ended:
            progress.error = _as_error(error)
            self.abort(progress.request.request_id)
        return ended

    def _expire(self, now: float) -> list[RequestProgress]:
        """End the requests whose deadline has passed."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            due, name = heappop(self._deadlines)
            progress = self._requests.get(name)
            # the name may be another request's by now, which has a deadline of its own
            if progress is not None and progress.due == due:
                expired += self._fail(
                    [progress],
                    DeadlineExceeded(
                        f"the request did not end within its deadline of "
                        f"{progress.request.deadline} s: allow more time or ask for fewer tokens"
                    ),
                )
        return expired

    def _end_warm(self) -> list[RequestProgress]:
        """End the requests without an answer that have all they were to compute."""
        done = [s for s in self._scheduler.running if s.warms and s.warm]
        outputs = [self._outputs[sequence] for sequence in done]
        for output in outputs:
            output.stop.close("stop")
            self._retire(output)
        return [output.request for output in outputs]

    def _retire(self, output: OutputProgress) -> None:
        progress = output.request
        name = progress.request.request_id
        if progress.finished and (ended := self._warming.pop(name, None)):
            try:
                ended(progress)
            except Exception as error:
                progress.error = _as_error(error)
        self._scheduler.remove(output.sequence)
        del self._outputs[output.sequence]
        if progress.finished:
            progress.mark_finished()
            self._requests.pop(name, None)
            self._count_end(progress)

    def _count_end(self, progress: RequestProgress) -> None:
        if progress.request.warms:
            return
        if isinstance(progress.error, DeadlineExceeded):
            self.counters.deadline_exceeded += 1
        elif progress.error is not None:
            self.counters.failed += 1
        elif any(o.stop.finish and o.stop.finish.reason == "abort" for o in progress.outputs):
            self.counters.aborted += 1
        else:
            self.counters.finished += 1

    def _refuse(self, sequence: Sequence) -> RequestProgress:
        """End a request that cannot be admitted though nobody else runs."""
        progress = self._outputs[sequence].request
        error = PoolTooSmall(
            f"the pool of {self.store.pool.num_pages} pages has too few left beside its pinned "
            "segments: unpin some or enlarge the cache"
        )
        self._fail([progress], error)
        return progress

    def _book_admissions(self, work: StepWork) -> None:
        self.counters.preemptions += len(work.preempted)
        for sequence, report in work.admitted:
            output = self._outputs[sequence]
            if output.reuse is None:
                if output.request.metrics.admitted is None:
                    output.request.mark_admitted()
                    self.documents.note_admission(sequence, report)
                    if not sequence.warms:
                        self.counters.count_reuse(report)
                output.reuse = report
            else:
                again = (
                    report.text_tokens - report.text_tokens_cached + report.document_tokens_computed
                )
                output.request.preempted_tokens += again

    def _book_step(self, work: StepWork) -> None:
        counters, plan = self.counters, self.runner.attention.counters
        counters.steps += 1
        counters.prompt_tokens += sum(chunk.stop - chunk.start for chunk in work.chunks)
        counters.items, counters.grouped_items = plan.items, plan.grouped_items
        counters.grouped_rows = plan.grouped_rows
        if work.decode:
            shared = self._shared_keys.of(self.runner.attention.groups, len(work.decode))
            for sequence, keys in zip(work.decode, shared, strict=True):
                self._outputs[sequence].request.count_decode(sequence.num_tokens, keys)


def _as_error(error: Exception) -> LooseleafError:
    if isinstance(error, LooseleafError):
        return error
    fault = EngineFault(
        f"a fault inside the engine ended this request ({type(error).__name__}: {error}): "
        "send it again, and report it if it happens twice"
    )
    fault.__cause__ = error
    return fault


def drain(engine: Engine) -> Iterable[RequestProgress]:
    """Step until nothing is left to do, yielding each request when it ends, well or with its
    ``error``.
    """
    while engine.has_work:
        for progress in engine.step():
            if progress.finished:
                yield progress

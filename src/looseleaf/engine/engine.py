"""The engine: requests in, steps, outputs. It uses no HTTP, no threads and no processes.

A loop, a thread or another scheduler calls `step`, and adds and aborts requests between steps."""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import count

from torch import Tensor

from looseleaf.config import EngineConfig
from looseleaf.engine.accounting import Accounting
from looseleaf.engine.admission import Admission
from looseleaf.engine.background import BackgroundWork
from looseleaf.engine.canary import Canary
from looseleaf.engine.documents.holdings import HeldDocuments, Holdings
from looseleaf.engine.documents.hosting import Hosting
from looseleaf.engine.documents.registry import Documents
from looseleaf.engine.features import Features
from looseleaf.engine.input_processor import InputProcessor
from looseleaf.engine.kv_events import make_kv_events
from looseleaf.engine.lifetime import close, only_here
from looseleaf.engine.profile_run import make_tiering
from looseleaf.engine.progress import OutputProgress, RequestProgress, deadline_error
from looseleaf.engine.reports.stats import EngineCounters, EngineSnapshot, StepStats
from looseleaf.engine.runner.isolate_faults import ComputedStep, isolate_fault
from looseleaf.engine.runner.runner import Runner
from looseleaf.engine.runner.step_sampler import Drawing, InFlightStep, drawing_rows, plan_of
from looseleaf.engine.sampling.grammar import GrammarCompiler
from looseleaf.engine.sampling.sampler import TokenLogprob
from looseleaf.engine.scheduler import Scheduler, StepWork
from looseleaf.engine.sequence import Sequence
from looseleaf.engine.step_budget import StepBudget
from looseleaf.errors import (
    DeadlineExceeded,
    EngineClosed,
    InvalidOption,
    InvalidRequest,
    LooseleafError,
    PoolTooSmall,
    as_looseleaf_error,
)
from looseleaf.graphs.rows import awaited_token
from looseleaf.kv.keys import KeySpace
from looseleaf.kv.store import SegmentStore
from looseleaf.machine.device import synchronize
from looseleaf.machine.threads import ThreadChoice
from looseleaf.models.tokenizer.tokenizer import Tokenizer
from looseleaf.ops.compiled import num_compiled
from looseleaf.parallel.ranks import ALONE, command
from looseleaf.prompt.builder import PromptBuilder
from looseleaf.prompt.primer import RequestDefaults
from looseleaf.prompt.request import PromptParts, Request, SystemPrompt, TextPart
from looseleaf.sampling_params import SamplingParams
from looseleaf.tiers import Tiers

Ended = Callable[[RequestProgress], None]


@dataclass(frozen=True)
class EngineParts:
    """The parts of an engine. ``defaults`` apply to its requests."""

    config: EngineConfig
    runner: Runner
    tokenizer: Tokenizer
    keys: KeySpace
    max_model_len: int
    tiers: Tiers | None = None
    threads: ThreadChoice | None = None
    defaults: RequestDefaults | None = None


class Engine:
    """Runs requests over one model. Not thread-safe: one caller at a time.

    On a GPU it launches step n+1 before step n's tokens reach the host, and reads them on the
    device. An output that ends with step n is computed once in vain."""

    def __init__(self, parts: EngineParts) -> None:
        self.config = config = parts.config
        self.tokenizer = parts.tokenizer
        self.max_model_len = parts.max_model_len
        self.threads = parts.threads
        self._defaults = parts.defaults
        self.runner = parts.runner
        self.store = SegmentStore(parts.runner.pool)
        self.last_step: StepStats | None = None
        shape = parts.runner.model.config
        self.ranks = ranks = parts.runner.model.ranks
        self.prompts = PromptBuilder(parts.tokenizer, shape.vocab_size)
        self.grammars = GrammarCompiler(parts.tokenizer, shape.vocab_size, ranks)
        self.hosting = Hosting.create(parts.runner, parts.keys, config)
        self.documents = Documents(
            self.store,
            parts.keys,
            warm=self.warm,
            cancel=self.abort,
            tiers=parts.tiers,
            hosting=self.hosting,
        )
        host = parts.tiers.host if parts.tiers else None
        self._holdings = Holdings(self.store, self.documents.segment_keys, host=host)
        self.accounting = Accounting(parts.runner.attention, self.documents, config.cache.page_size)
        self.tiers = parts.tiers
        self.tiering = make_tiering(parts.tiers, self.store, parts.runner)
        on_gpu = parts.runner.model.device.type == "cuda"
        self.max_num_seqs = config.concurrent_sequences(on_gpu)
        prefixes = config.cache.prefix_caching
        self._events = make_kv_events(config.cache, self.store)
        self._admission = Admission(self.store, parts.keys, prefixes, self.tiering, self._events)
        self._input_processor = InputProcessor(
            parts.tokenizer,
            self.grammars,
            self._admission,
            max_model_len=parts.max_model_len,
            model=shape,
            features=Features.create(parts.runner, config),
            break_even=parts.runner.break_even,
            find_hosted=self.hosting.find,
            is_coming=self.hosting.is_coming,
        )
        self._scheduler = Scheduler(
            self.max_num_seqs,
            self._admission,
            token_budget=self.hosting.chunk_tokens,
            tiering=self.tiering,
        )
        step_goal = config.step_goal(on_gpu)
        if step_goal is not None:
            compute_time = self.tiering.measured_compute_time()
            self._scheduler.goal = StepBudget(step_goal, compute_time, ranks)
        self._drawing = Drawing(parts.runner.model.device, ranks)
        self._requests: dict[str, RequestProgress] = {}
        self._outputs: dict[Sequence, OutputProgress] = {}
        self._warming: dict[str, Ended] = {}
        self._deadlines = self.tiering.deadlines
        self._background = BackgroundWork()
        self.hosting.enlist = enlist = self._background.enlist
        self._canary = Canary(
            config,
            self.accounting.counters,
            add=self.add,
            waiting=self._scheduler.waiting,
            enlist=enlist,
        )
        self._numbers, self._warm_numbers = count(), count()
        self._ahead: InFlightStep | None = None
        self._had_fault = False
        # flush to the tiers even if the caller never calls close()
        self.sandboxes = [*parts.tokenizer.sandboxes, self.grammars.sandbox]
        self.close = weakref.finalize(
            self,
            only_here(close),
            indexing=self.hosting.indexing,
            tiering=self.tiering,
            runner=parts.runner,
            sandboxes=self.sandboxes,
            events=self._events,
        )

    @property
    def counters(self) -> EngineCounters:
        """Sums since the start of the engine."""
        return self.accounting.counters

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self._scheduler.has_work or self._background.has_work

    def knows(self, request_id: str) -> bool:
        """Whether the request was added and has not ended."""
        return request_id in self._requests

    def snapshot(self) -> EngineSnapshot:
        """The numbers of the engine between two steps, at a cost independent of the cache."""
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
            tiers=self.tiers.snapshot() if self.tiers else (),
            skipped_writes=self.tiers.skipped_writes if self.tiers else 0,
            hosted=self.hosting.counters,
            kernels=num_compiled(),
            graphs=self.runner.num_graphs,
        )

    def held_documents(self) -> HeldDocuments:
        """The documents in the pool and in host memory, for the routers of a fleet."""
        return self._holdings.summary(len(self._scheduler.running), len(self._scheduler.waiting))

    def add(self, request: Request, arrived: float | None = None) -> RequestProgress:
        """Queue a request that arrived now, or at ``arrived`` on the clock `time.perf_counter`.

        Raises a subclass of InvalidRequest if it can't be served, EngineClosed after `close`."""
        if not self.close.alive:
            raise EngineClosed("this engine is closed: make a new one")
        with ALONE if self.ranks is None else self.ranks.link.command("add", request):
            if request.request_id in self._requests:
                raise InvalidRequest(
                    f"request id {request.request_id!r} is in use: choose another one"
                )
            number = next(self._warm_numbers if request.warms else self._numbers)
            if self._defaults is not None:
                request = self._defaults.applied(request)
            if request.fuse is not None:
                request = self._canary.adjusted(request)
            progress = self._input_processor.take(request, self.config.seed + number)
            if arrived is not None:
                progress.arrived = arrived
            self._requests[request.request_id] = progress
            if progress.outputs[0].sequence.documents:
                self._holdings.note(progress.outputs[0].sequence)
            self.counters.requests += not (request.warms or request.canary)
            for output in progress.outputs:
                self._outputs[output.sequence] = output
                self._scheduler.add(output.sequence)
            if request.deadline is not None:
                self._deadlines.add(progress)
            return progress

    def warm(
        self, parts: PromptParts, salt: str = "", ended: Ended = lambda _: None
    ) -> RequestProgress:
        """Compute a prompt without an answer: its documents, or its text without documents.

        The last of ``parts`` is empty text. ``ended`` is called at the end, before the segments are
        released. Raises as `add` does."""
        name = f"(warm {next(self._warm_numbers)})"
        progress = self.add(Request(name, parts, SamplingParams(max_tokens=1), salt, warms=True))
        self._warming[name] = ended
        return progress

    @command("hold")
    def hold(self, prompt: SystemPrompt) -> RequestProgress:
        """Compute and pin the pages of a service's system prompt, for all salts.

        Raises InvalidOption without prefix caching, and the errors of `add`."""
        if not self.config.cache.prefix_caching:
            raise InvalidOption(
                "a system prompt is held in the prefix cache: leave prefix_caching on"
            )

        def pin(progress: RequestProgress) -> None:
            if progress.error is None:
                self._admission.pin_prefix(progress.outputs[0].sequence)

        return self.warm((TextPart(prompt.tokens, len(prompt.tokens)), TextPart(())), "", pin)

    def abort(self, request_id: str, error: LooseleafError | None = None) -> None:
        """End an active request, with ``error`` if it failed, and release its pages."""
        with ALONE if self.ranks is None else self.ranks.link.command("abort", request_id, error):
            progress = self._requests.get(request_id)
            for output in progress.outputs if progress else ():
                if not output.finished:
                    output.request.error = output.request.error or error
                    output.stop.close("abort")
                    self._retire(output)

    @command("end_output")
    def end_output(self, request_id: str, index: int) -> RequestProgress | None:
        """End one output of an active request, whose caller has found a stop string in its text.

        Returns the request, None if the output has ended already."""
        progress = self._requests.get(request_id)
        output = progress.outputs[index] if progress else None
        if output is None or output.finished:
            return None
        output.stop.close("stop")
        self._retire(output)
        return progress

    def step(self) -> list[RequestProgress]:
        """Schedule, compute, sample. Returns the requests that have new tokens or have ended.

        A fault ends only its requests, with ``error``. Raises EngineClosed after `close`, and the
        error of a device that can't compute any more."""
        if not self.close.alive:
            raise EngineClosed("this engine is closed: the answer is not complete")
        begun = self.accounting.begin_step()
        changed = self._expire(begun) if self._deadlines.entries else []
        # after the deadlines, which are those of rank 0
        with ALONE if self.ranks is None else self.ranks.link.command("step"):
            if self._background.works:
                self._background.step()
            launched = (self._ahead and self._take_ahead()) or self._launch_next(changed)
            if self.tiering.arriving:
                self.tiering.wake()
            if launched is not None:
                self._finish(launched, changed)
            if self._warming:
                changed += self._end_warm()
            self.last_step = self.accounting.end_step(launched.work if launched else None)
            if self._events is not None:
                self._events.flush()
            if self._had_fault:
                self._had_fault = False
                synchronize(self.runner.model.device)
            return list(dict.fromkeys(changed))

    def _launch_next(self, changed: list[RequestProgress]) -> InFlightStep | None:
        """Schedule a step and launch it; refused and failed requests join ``changed``."""
        try:
            work = self._scheduler.schedule()
        except Exception as error:
            # the scheduler's state is unknown, so all requests end
            changed += self._fail(self._requests.values(), error)
            return None
        changed += map(self._refuse, work.refused)
        return self._launch(work, changed)

    def _launch(
        self, work: StepWork, changed: list[RequestProgress], previous: Tensor | None = None
    ) -> InFlightStep | None:
        """Compute a step and sample from it. ``previous`` has the tokens of the step in flight."""
        try:
            if work.admitted or work.preempted:
                self.accounting.book_admissions(work, self._outputs)
            if work.empty:
                return None
            computed = self._compute(work, previous)
        except Exception as error:
            changed += self._fail(self._requests_of(work), error)
            return None
        for part, fault in computed.failed:
            changed += self._fail(self._requests_of(part), fault)
        work, result = computed.work, computed.result
        if work.empty:
            return None
        self.accounting.book_step(work, result, self._outputs)
        sequences, logits = drawing_rows(work, result.logits)
        outputs = [self._outputs[sequence] for sequence in sequences]
        if not outputs:
            return InFlightStep(work, [])

        def end(output: OutputProgress, error: Exception) -> None:
            changed.extend(self._fail([output.request], error))

        plan = "" if self.ranks is None else plan_of(work, self.store.pool)
        return InFlightStep(work, self._drawing.draw(outputs, logits, end, plan))

    def _compute(self, work: StepWork, previous: Tensor | None) -> ComputedStep:
        """Run a step; after a fault, run its requests separately."""
        run = self.runner.run
        try:
            return ComputedStep(work, run(work, previous))
        except Exception as error:
            if self.ranks is not None:
                # other ranks may have no fault
                raise
            fault = error
        return isolate_fault(run, work, previous, self._scheduler.take_back, fault)

    def _launch_ahead(
        self, launched: InFlightStep, changed: list[RequestProgress]
    ) -> InFlightStep | None:
        """Launch the step after ``launched``, if it does not depend on the tokens of that one."""
        if len(launched.draws) > 1:
            return None
        draw = launched.draws[0] if launched.draws else None
        yielding = [
            (row, o) for row, o in enumerate(draw.outputs if draw else []) if not o.finished
        ]
        if any(output.sampling.grammar is not None for _, output in yielding):
            # the grammar's next mask depends on the token
            return None
        going_on = {o.sequence: row for row, o in yielding if not o.stop.ends_with_next}
        for sequence, row in going_on.items():
            sequence.append(awaited_token(row))
        try:
            work = self._scheduler.schedule_ahead({o.sequence for _, o in yielding} - {*going_on})
            if work is None:
                return None
            return self._launch(work, changed, draw.sampled.token_ids if draw else None)
        except Exception as error:
            changed += self._fail(self._requests.values(), error)
            return None
        finally:
            for sequence in going_on:
                sequence.drop_awaited()

    def _take_ahead(self) -> InFlightStep | None:
        """The step launched ahead, without sequences that have ended; None if it is empty."""
        launched, self._ahead = self._ahead, None
        work = launched.work.without_ended() if launched else None
        return replace(launched, work=work) if launched and work and not work.empty else None

    def _finish(self, launched: InFlightStep, changed: list[RequestProgress]) -> None:
        """Record a step, launch the next one ahead on a GPU, and hand out the tokens."""
        try:
            # a sampling fault has already ended its request and released the pages
            complete = self._scheduler.complete(launched.work.without_ended())
        except Exception as error:
            changed += self._fail(self._requests_of(launched.work), error)
            return
        changed += [self._end_undrawn(sequence) for sequence in complete if not sequence.draws]
        if self.runner.runs_ahead:
            self._ahead = self._launch_ahead(launched, changed)
        for draw in launched.draws:
            taking = [(row, o) for row, o in enumerate(draw.outputs) if not o.finished]
            tokens = draw.arrival.wait()
            if self.ranks is not None:
                self.ranks.require_all()
            for row, output in taking:
                # a sibling's fault may have ended it
                if not output.finished:
                    self._take(output, tokens[row], draw.sampled.logprobs.get(row))
            changed += [output.request for _, output in taking]

    def _requests_of(self, work: StepWork) -> list[RequestProgress]:
        sequences = [*work.decode, *work.choosing, *(chunk.sequence for chunk in work.chunks)]
        return [self._outputs[s].request for s in sequences if s in self._outputs]

    def check(self) -> None:
        """Raise IntegrityError unless every page is accounted for. For tests, between steps."""
        running = self._scheduler.running
        self.store.check([page for sequence in running for page in sequence.private_pages()])

    def _take(
        self, output: OutputProgress, token: int, logprobs: tuple[TokenLogprob, ...] | None
    ) -> None:
        try:
            output.push(token, logprobs)
        except Exception as error:
            self._fail([output.request], error)
            return
        self.accounting.book_token(output.request)
        if output.finished:
            self._retire(output)

    def _fail(self, requests: Iterable[RequestProgress], error: Exception) -> list[RequestProgress]:
        """End requests with ``error``. With several ranks a fault ends the engine: it is raised."""
        refuses = isinstance(error, InvalidRequest | DeadlineExceeded)
        if self.ranks is not None and not refuses:
            raise error
        self._had_fault = self._had_fault or not isinstance(error, LooseleafError)
        ended = list(dict.fromkeys(requests))
        for progress in ended:
            progress.error = as_looseleaf_error(error)
            self.abort(progress.request.request_id)
        return ended

    def _expire(self, now: float) -> list[RequestProgress]:
        """End the requests whose deadline has passed."""
        expired = self._deadlines.expired(now, self._requests)
        for progress in expired:
            self._fail([progress], deadline_error(progress))
        return expired

    def _end_warm(self) -> list[RequestProgress]:
        """End the warming requests that are complete."""
        complete = [s for s in self._scheduler.running if s.warms and s.warm]
        outputs = [self._outputs[sequence] for sequence in complete]
        for output in outputs:
            output.stop.close("stop")
            self._retire(output)
        return [output.request for output in outputs]

    def _end_undrawn(self, sequence: Sequence) -> RequestProgress:
        """End an output of no tokens, whose prompt is complete."""
        output = self._outputs[sequence]
        output.stop.close("length")
        self._retire(output)
        return output.request

    def _retire(self, output: OutputProgress) -> None:
        progress = output.request
        name = progress.request.request_id
        if progress.finished and (ended := self._warming.pop(name, None)):
            try:
                ended(progress)
            except Exception as error:
                progress.error = as_looseleaf_error(error)
        self._scheduler.remove(output.sequence)
        del self._outputs[output.sequence]
        if progress.finished:
            progress.mark_finished()
            self._requests.pop(name, None)
            self.accounting.book_end(progress)
            if progress.request.fuse is not None or progress.request.canary:
                self._canary.ended(progress)

    def _refuse(self, sequence: Sequence) -> RequestProgress:
        """End a request that can't be admitted although no other request runs."""
        progress = self._outputs[sequence].request
        error = PoolTooSmall(
            f"the pool of {self.store.pool.num_pages} pages has too few left beside its pinned "
            "segments: unpin some or enlarge the cache"
        )
        self._fail([progress], error)
        return progress

"""What is written down of steps and requests: counters, reuse reports, who read with whom."""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace

from looseleaf.attention.paged import PagedAttention
from looseleaf.attention.plan.groups import Groups
from looseleaf.attention.plan.planner import PlanCounters
from looseleaf.attention.select.attend_pages import RowReads
from looseleaf.attention.select.candidates import PagePolicy
from looseleaf.engine.documents.registry import Documents
from looseleaf.engine.progress import OutputProgress, RequestProgress
from looseleaf.engine.reports.outputs import DocumentReuse, DocumentSource, ReuseReport
from looseleaf.engine.reports.stats import EngineCounters, StepStats, shared_keys
from looseleaf.engine.scheduler import StepWork
from looseleaf.engine.sequence import Sequence
from looseleaf.errors import DeadlineExceeded
from looseleaf.graphs.step_result import StepResult
from looseleaf.prompt.placements import DocumentUse, keys_of

Outputs = Mapping[Sequence, OutputProgress]


@dataclass(frozen=True, eq=False)
class _Coming:
    """Documents of a sequence that are to be loaded, or computed if that fails, and whether its
    request ``counts``."""

    documents: list[tuple[DocumentUse, DocumentReuse]]
    counts: bool

    @property
    def ended(self) -> bool:
        return all(use.fell_back or use.seconds is not None for use, _ in self.documents)


@dataclass(eq=False)
class Accounting:
    """Accounting of one engine. A step is booked right after it was launched.

    ``on_queued`` hears for each request how many seconds it waited, when it is admitted, or when it
    ends without; ``on_first_token`` after how many seconds its first token came, when it does. Both
    are called in the engine's thread."""

    attention: PagedAttention
    documents: Documents
    page_size: int
    counters: EngineCounters = field(default_factory=EngineCounters)
    on_queued: Callable[[float], None] = lambda seconds: None
    on_first_token: Callable[[float], None] = lambda seconds: None
    # whose documents are counted when it is known how they came
    _coming: dict[Sequence, _Coming] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._plan = self.attention.counters
        # keys that each row of the latest groups reads together with others
        self._groups: Groups | None = None
        self._shared: Rows[int] = ()
        self._launched: float | None = None
        self._begun, self._before = 0.0, PlanCounters()

    def begin_step(self) -> float:
        """A step begins, at the time that is returned."""
        self._begun, self._before = time.perf_counter(), replace(self._plan)
        self._launched = None
        return self._begun

    def end_step(self, work: StepWork | None) -> StepStats:
        """What the step did that began last; ``work`` is what it computed, if anything."""
        plan, before = self._plan, self._before
        return StepStats(
            time.perf_counter() - self._begun,
            _num_new_rows(work) if work is not None and work.chunks else 0,
            len(work.decode) if work else 0,
            plan.items - before.items,
            plan.grouped_items - before.grouped_items,
            plan.grouped_rows - before.grouped_rows,
            self._launched,
        )

    def book_admissions(self, work: StepWork, outputs: Outputs) -> None:
        """Who entered with a step, and what they found; and who had to make room."""
        self.counters.preemptions += len(work.preempted)
        for sequence, report in work.admitted:
            output = outputs[sequence]
            if output.reuse is None:
                if output.request.metrics.admitted is None:
                    counts = _counts(output.request)
                    waited = output.request.mark_admitted()
                    if counts:
                        self.on_queued(waited)
                    self._book_reuse(sequence, report, counts=counts)
                output.reuse = report
            else:
                again = (
                    report.text_tokens - report.text_tokens_cached + report.document_tokens_computed
                )
                output.request.preempted_tokens += again

    def _book_reuse(self, sequence: Sequence, report: ReuseReport, *, counts: bool) -> None:
        """What a request found when it was first admitted; it is in the sums if it ``counts``."""
        if report.documents:
            self.documents.note_admission(sequence, report)
        coming = [document.source == "loaded" for document in report.documents]
        if counts:
            here = [d for d, comes in zip(report.documents, coming, strict=True) if not comes]
            self.counters.count_reuse(replace(report, documents=tuple(here)))
        if any(coming):
            pooled = [document for document in report.documents if not document.hosted]
            pairs = zip(sequence.documents, pooled, strict=True)
            loaded = [(use, document) for use, document in pairs if document.source == "loaded"]
            self._coming[sequence] = _Coming(loaded, counts)

    def _book_arrivals(self, sequence: Sequence, coming: _Coming) -> None:
        """Documents of a sequence were loaded, or not."""
        documents = []
        for use, document in coming.documents:
            source: DocumentSource = "computed" if use.fell_back else "loaded"
            self.documents.note_arrival(sequence, use, source)
            documents.append(replace(document, source=source))
        if coming.counts:
            self.counters.count_reuse(ReuseReport(tuple(documents)))
        del self._coming[sequence]

    def book_step(self, work: StepWork, result: StepResult, outputs: Outputs) -> None:
        """What a step computed, and what its decode rows read together."""
        for sequence, coming in list(self._coming.items()):
            if coming.ended:
                self._book_arrivals(sequence, coming)
        self._launched = self._launched or result.launched
        self.counters.steps += 1
        if work.chunks:
            self.counters.prompt_tokens += _num_new_rows(work)
        for name, number in vars(self._plan).items():
            setattr(self.counters, name, number)
        if not work.decode:
            return
        if result.groups is not self._groups:
            self._groups = result.groups
            self._shared = shared_keys(result.groups, len(work.decode), self.page_size)
        reads: dict[int, RowReads] | None = None
        for place, sequence in enumerate(work.decode):
            request, num_keys = outputs[sequence].request, sequence.num_tokens
            keys = self._shared[place]
            if sequence.features:
                reads = _reads(result) if reads is None else reads
                row = reads.get(place)
                num_keys, keys = self._book_reads(sequence, row, request, num_keys, keys)
            request.count_decode(num_keys, keys)

    def _book_reads(
        self,
        sequence: Sequence,
        row: RowReads | None,
        request: RequestProgress,
        num_keys: int,
        keys: int,
    ) -> tuple[int, int]:
        """What a row read of ``num_keys``, ``keys`` of them together with others, if it chooses or
        reads hosted documents; returns both numbers as they are then."""
        if sequence.policy is not None:
            row = row or self._dense(sequence)
            request.count_pages(row.pages, row.of_pages, self._bytes(row), row.recall)
            self.counters.pages_read += row.pages
            self.counters.pages_held += row.of_pages
            num_keys = num_keys * row.pages // row.of_pages
            if row.pages < row.of_pages:
                # rows read together in layers that are dense for all of them
                keys = keys * self._num_dense(sequence.policy) // self._num_layers
        elif sequence.hosted:
            num_keys -= self._book_hosted(sequence, request) // self._num_layers
        return num_keys, keys

    def _book_hosted(self, sequence: Sequence, request: RequestProgress) -> int:
        """What a row read of hosted documents; returns the keys that one of its query heads left
        out, summed over layers."""
        hosted, heads = sequence.hosted_reads, self.attention.num_qo_heads
        if not hosted:
            # documents of no tokens are before nothing
            return 0
        counts = [keys_of(use) for use in hosted]
        read, there = sum(keys for keys, _ in counts), sum(keys for _, keys in counts)
        kv = hosted[0].segment.kv
        # a key and its value
        width = 2 * kv.shape[4] * kv.element_size()
        request.count_hosted(heads * read, heads * there, heads * read * width)
        return there - read

    def _dense(self, sequence: Sequence) -> RowReads:
        """What a row reads that has a policy and reads everything all the same."""
        layers, _, _, heads = self.attention.pool.kv.shape[:4]
        row = sequence.decode_row()
        pages = layers * heads * sum(len(span.pages) for span in (*row.settled, row.tail))
        return RowReads(pages, pages, 0, None)

    @property
    def _num_layers(self) -> int:
        return int(self.attention.pool.kv.shape[0])

    def _num_dense(self, policy: PagePolicy) -> int:
        return sum(layer in policy.dense_layers for layer in range(self._num_layers))

    def _bytes(self, row: RowReads) -> int:
        pool = self.attention.pool
        layers, _, _, heads = pool.kv.shape[:4]
        return row.pages * pool.bytes_per_page // (layers * heads) + row.looked_bytes

    def book_token(self, progress: RequestProgress) -> None:
        """A token of a request has come."""
        self.counters.output_tokens += 1
        if progress.metrics.first_token is None:
            seconds = progress.mark_token()
            if _counts(progress):
                self.on_first_token(seconds)

    def book_end(self, progress: RequestProgress) -> None:
        """How a request ended."""
        for output in progress.outputs:
            coming = self._coming.get(output.sequence)
            if coming is not None:
                self._book_arrivals(output.sequence, coming)
        if not _counts(progress):
            return
        times = progress.metrics
        if times.admitted is None and times.finished is not None:
            self.on_queued(times.finished)
        again = (sum(output.sequence.recomputed()) for output in progress.outputs)
        self.counters.document_tokens_recomputed += sum(again)
        if isinstance(progress.error, DeadlineExceeded):
            self.counters.deadline_exceeded += 1
        elif progress.error is not None:
            self.counters.failed += 1
        elif any(o.stop.finish and o.stop.finish.reason == "abort" for o in progress.outputs):
            self.counters.aborted += 1
        else:
            self.counters.finished += 1


def _num_new_rows(work: StepWork) -> int:
    return sum(chunk.stop - chunk.start for chunk in work.chunks)


def _reads(result: StepResult) -> dict[int, RowReads]:
    """What the rows that choose read, by their place in the step."""
    return {
        place: row
        for some in result.selected
        for place, row in zip(some.indices, some.reads(), strict=True)
    }


def _counts(progress: RequestProgress) -> bool:
    """Whether a request is in the sums: the engine's own are not."""
    return not progress.request.warms and not progress.request.canary

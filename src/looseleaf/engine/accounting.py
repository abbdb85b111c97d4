"""Accounting of steps and requests: counters, reuse reports and keys that rows read together."""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace

from looseleaf.attention.paged import PagedAttention
from looseleaf.attention.plan.groups import Groups
from looseleaf.attention.plan.planner import PlanCounters
from looseleaf.attention.select.attend_pages import RowReads
from looseleaf.attention.select.policy import PagePolicy
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
class _PendingDocuments:
    """Documents of a sequence that load, or are computed if the load fails. ``counts`` is whether
    the counters include its request."""

    documents: list[tuple[DocumentUse, DocumentReuse]]
    counts: bool

    @property
    def ended(self) -> bool:
        return all(use.fell_back or use.seconds is not None for use, _ in self.documents)


@dataclass(eq=False)
class Accounting:
    """The accounting of one engine. A step is counted right after its launch.

    ``on_queued`` is called with the seconds that a request waited, at its admission or at its end.
    ``on_first_token`` is called with the seconds until its first token. Both run in the engine's
    thread."""

    attention: PagedAttention
    documents: Documents
    page_size: int
    counters: EngineCounters = field(default_factory=EngineCounters)
    on_queued: Callable[[float], None] = lambda seconds: None
    on_first_token: Callable[[float], None] = lambda seconds: None
    # documents are counted once their load has ended
    _coming: dict[Sequence, _PendingDocuments] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._plan = self.attention.counters
        # keys that each row of the latest groups shares with other rows
        self._groups: Groups | None = None
        self._shared: Rows[int] = ()
        self._launched: float | None = None
        self._begun, self._before = 0.0, PlanCounters()

    def begin_step(self) -> float:
        """Begin a step; returns the time."""
        self._begun, self._before = time.perf_counter(), replace(self._plan)
        self._launched = None
        return self._begun

    def end_step(self, work: StepWork | None) -> StepStats:
        """The statistics of the current step; ``work`` is its work, if it had any."""
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
        """Count admissions, their reuse, and preemptions of a step."""
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
                recomputed = (
                    report.text_tokens - report.text_tokens_cached + report.document_tokens_computed
                )
                output.request.preempted_tokens += recomputed

    def _book_reuse(self, sequence: Sequence, report: ReuseReport, *, counts: bool) -> None:
        """Count the reuse of a request at its first admission, in the sums if it ``counts``."""
        if report.documents:
            self.documents.note_admission(sequence, report)
        settled = [document for document in report.documents if document.source != "loaded"]
        if counts:
            self.counters.count_reuse(replace(report, documents=tuple(settled)))
        if len(settled) < len(report.documents):
            pooled = [document for document in report.documents if not document.hosted]
            pairs = zip(sequence.documents, pooled, strict=True)
            loaded = [(use, document) for use, document in pairs if document.source == "loaded"]
            self._coming[sequence] = _PendingDocuments(loaded, counts)

    def _book_arrivals(self, sequence: Sequence, coming: _PendingDocuments) -> None:
        """Count documents of a sequence whose load has ended, with or without success."""
        documents = []
        for use, document in coming.documents:
            source: DocumentSource = "computed" if use.fell_back else "loaded"
            self.documents.note_arrival(sequence, use, source)
            documents.append(replace(document, source=source))
        if coming.counts:
            self.counters.count_reuse(ReuseReport(tuple(documents)))
        del self._coming[sequence]

    def book_step(self, work: StepWork, result: StepResult, outputs: Outputs) -> None:
        """Count the work of a step and the keys that its decode rows share."""
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
        for row, sequence in enumerate(work.decode):
            request, num_keys = outputs[sequence].request, sequence.num_tokens
            keys = self._shared[row]
            if sequence.features:
                reads = _reads(result) if reads is None else reads
                selected = reads.get(row)
                num_keys, keys = self._book_reads(sequence, selected, request, num_keys, keys)
            request.count_decode(num_keys, keys)

    def _book_reads(
        self,
        sequence: Sequence,
        row: RowReads | None,
        request: RequestProgress,
        num_keys: int,
        keys: int,
    ) -> tuple[int, int]:
        """Count the reads of a row that selects pages or reads host-resident documents.

        Returns the keys that it read of ``num_keys``, and the shared ones of ``keys``."""
        if sequence.policy is not None:
            row = row or self._dense(sequence)
            request.count_pages(row.pages, row.of_pages, self._bytes(row), row.recall)
            self.counters.pages_read += row.pages
            self.counters.pages_held += row.of_pages
            num_keys = num_keys * row.pages // row.of_pages
            if row.pages < row.of_pages:
                # rows share reads only in dense layers
                keys = keys * self._num_dense(sequence.policy) // self._num_layers
        elif sequence.hosted:
            num_keys -= self._book_hosted(sequence, request) // self._num_layers
        return num_keys, keys

    def _book_hosted(self, sequence: Sequence, request: RequestProgress) -> int:
        """Count the reads of host-resident documents by a row.

        Returns the keys that one query head did not read, summed over layers."""
        hosted, heads = sequence.hosted_reads, self.attention.num_qo_heads
        if not hosted:
            # documents without tokens have no reads
            return 0
        counts = [keys_of(use) for use in hosted]
        read, total = sum(keys for keys, _ in counts), sum(keys for _, keys in counts)
        kv = hosted[0].segment.kv
        bytes_per_key = 2 * kv.shape[4] * kv.element_size()
        request.count_hosted(heads * read, heads * total, heads * read * bytes_per_key)
        return total - read

    def _dense(self, sequence: Sequence) -> RowReads:
        """The reads of a row whose policy reads all pages."""
        layers, heads = self._num_layers, self.attention.pool.kv.shape[3]
        row = sequence.decode_row()
        pages = layers * heads * sum(len(span.pages) for span in (*row.settled, row.tail))
        return RowReads(pages, pages, 0, None)

    @property
    def _num_layers(self) -> int:
        return len(self.attention.rules)

    def _num_dense(self, policy: PagePolicy) -> int:
        return sum(layer in policy.dense_layers for layer in range(self._num_layers))

    def _bytes(self, row: RowReads) -> int:
        pool = self.attention.pool
        layers, _, _, heads = pool.kv.shape[:4]
        return row.pages * pool.bytes_per_page // (layers * heads) + row.looked_bytes

    def book_token(self, progress: RequestProgress) -> None:
        """Count an output token."""
        self.counters.output_tokens += 1
        if progress.metrics.first_token is None:
            seconds = progress.mark_token()
            if _counts(progress):
                self.on_first_token(seconds)

    def book_end(self, progress: RequestProgress) -> None:
        """Count the end of a request."""
        for output in progress.outputs:
            coming = self._coming.get(output.sequence)
            if coming is not None:
                self._book_arrivals(output.sequence, coming)
        if not _counts(progress):
            return
        times = progress.metrics
        if times.admitted is None and times.finished is not None:
            self.on_queued(times.finished)
        recomputed = (sum(output.sequence.recomputed()) for output in progress.outputs)
        self.counters.document_tokens_recomputed += sum(recomputed)
        if isinstance(progress.error, DeadlineExceeded):
            self.counters.deadline_exceeded += 1
        elif progress.error is not None:
            self.counters.failed += 1
        elif any(o.stop.finish and o.stop.finish.reason == "abort" for o in progress.outputs):
            self.counters.aborted += 1
        else:
            self.counters.finished += 1


def _num_new_rows(work: StepWork) -> int:
    return sum(chunk.num_rows for chunk in work.chunks)


def _reads(result: StepResult) -> dict[int, RowReads]:
    """The reads of rows that select pages, by row of the step."""
    return {
        row: reads
        for selected in result.selected
        for row, reads in zip(selected.indices, selected.reads(), strict=True)
    }


def _counts(progress: RequestProgress) -> bool:
    """Whether the counters include a request: they exclude the engine's own requests."""
    return not progress.request.warms and not progress.request.canary

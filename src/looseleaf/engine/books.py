"""What is written down of steps and requests: counters, reuse reports, who read with whom."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from looseleaf.attention.paged import PagedAttention
from looseleaf.engine.documents import Documents
from looseleaf.engine.progress import OutputProgress, RequestProgress
from looseleaf.engine.scheduler import StepWork
from looseleaf.engine.sequence import Sequence
from looseleaf.engine.stats import EngineCounters, SharedKeys
from looseleaf.errors import DeadlineExceeded

Outputs = Mapping[Sequence, OutputProgress]


@dataclass(eq=False)
class Books:
    """Books of one engine. A step is booked right after it was launched."""

    attention: PagedAttention
    documents: Documents
    page_size: int
    counters: EngineCounters = field(default_factory=EngineCounters)

    def __post_init__(self) -> None:
        self._shared_keys = SharedKeys(self.page_size)

    def book_admissions(self, work: StepWork, outputs: Outputs) -> None:
        """Who entered with a step, and what they found; and who had to make room."""
        self.counters.preemptions += len(work.preempted)
        for sequence, report in work.admitted:
            output = outputs[sequence]
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

    def book_step(self, work: StepWork, outputs: Outputs) -> None:
        """What a step computed, and what its decode rows read together."""
        counters, plan = self.counters, self.attention.counters
        counters.steps += 1
        counters.prompt_tokens += sum(chunk.stop - chunk.start for chunk in work.chunks)
        counters.items, counters.grouped_items = plan.items, plan.grouped_items
        counters.grouped_rows = plan.grouped_rows
        if work.decode:
            shared = self._shared_keys.of(self.attention.groups, len(work.decode))
            for sequence, keys in zip(work.decode, shared, strict=True):
                outputs[sequence].request.count_decode(sequence.num_tokens, keys)

    def book_end(self, progress: RequestProgress) -> None:
        """How a request ended."""
        if progress.request.warms:
            return
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

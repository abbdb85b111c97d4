"""What an engine counts: sums since it was made, what one step did, and all of it at one moment."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

from looseleaf.attention.host.attend import HostedCounters
from looseleaf.attention.plan.groups import Groups
from looseleaf.attention.plan.planner import PlanCounters
from looseleaf.engine.reports.outputs import ReuseReport
from looseleaf.kv.store import PageCounts
from looseleaf.tiers import TierState


@dataclass
class EngineCounters(PlanCounters):
    """Sums since the engine was made.

    ``prompt_tokens`` are those computed, ``output_tokens`` those drawn. Requests end as
    ``finished``, ``aborted``, ``failed`` or ``deadline_exceeded``; ``preemptions`` counts outputs.
    What a prompt found is counted once a request, when it is first admitted: tokens of text, those
    of them that were an exact prefix, and documents with their tokens by where they came from.
    ``document_tokens_recomputed`` are those that requests computed again, for every output that
    did, counted when the request ends. ``canaries`` are answers of theirs that were compared with
    full prefill's, ``canaries_agreed`` those that were the same; ``canary_raises`` counts how often
    ratios were raised since. The canaries' own work is in ``steps`` and in both sums of tokens.
    ``items`` are runs of settled pages that decode steps read, ``grouped_items`` those of them that
    serve several rows, ``grouped_rows`` how many; ``refused_groups`` are stretches that rows have
    in common and read alone, since that is faster. On a GPU what is read is cut: ``narrow_pieces``
    for tiles of few rows, ``wide_pieces`` for tiles of many; ``gathered_keys`` were laid out in the
    order of a prompt before its new rows read them, counted once for all layers. Rows of requests
    that choose what they read read ``pages_read`` of the ``pages_held``, counted once a layer and
    KV head.
    """

    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    deadline_exceeded: int = 0
    text_tokens: int = 0
    text_tokens_cached: int = 0
    documents_cached: int = 0
    documents_computed: int = 0
    documents_awaited: int = 0
    documents_loaded: int = 0
    document_tokens_cached: int = 0
    document_tokens_computed: int = 0
    document_tokens_awaited: int = 0
    document_tokens_loaded: int = 0
    document_tokens_recomputed: int = 0
    canaries: int = 0
    canaries_agreed: int = 0
    canary_raises: int = 0
    pages_read: int = 0
    pages_held: int = 0

    def count_reuse(self, report: ReuseReport) -> None:
        """Add what one request found."""
        self.text_tokens += report.text_tokens
        self.text_tokens_cached += report.text_tokens_cached
        for document in report.documents:
            for name, number in (("documents", 1), ("document_tokens", document.num_tokens)):
                field = f"{name}_{document.source}"
                setattr(self, field, getattr(self, field) + number)


@dataclass(frozen=True)
class StepStats:
    """What one step did. ``items``, ``grouped_items`` and ``grouped_rows`` as in the counters.

    ``launched`` is when it first gave the device something to do, on the clock `time.perf_counter`;
    None if it did not."""

    seconds: float
    prompt_tokens: int
    decode_rows: int
    items: int
    grouped_items: int
    grouped_rows: int
    launched: float | None


@dataclass(frozen=True)
class EngineSnapshot:
    """An engine between two steps. Sequences are counted, of which a request has ``n``.

    ``skipped_writes`` are documents that were not brought to the ``tiers``, since too much was.
    ``hosted`` is what was read of hosted documents. ``kernels`` were compiled or loaded and
    ``graphs`` captured so far, none of either on a CPU: a step that is the first of its kind waits
    for that."""

    running: int
    waiting: int
    pages: PageCounts
    segments: int
    registered_documents: int
    evicted_segments: int
    evicted_pages: int
    counters: EngineCounters
    tiers: tuple[TierState, ...] = ()
    skipped_writes: int = 0
    hosted: HostedCounters | None = None
    kernels: int = 0
    graphs: int = 0


def shared_keys(groups: Groups, num_rows: int, page_size: int) -> Rows[int]:
    """Keys that each decode row reads together with others, one number a row."""
    keys = [0] * num_rows
    for item in groups.items:
        # rows behind the newest are revised ones, of outputs that are counted already
        readers = [entry for entry in item.entries if entry.row < num_rows]
        if len(readers) > 1:
            first = item.first_page * page_size
            length = len(item.pages) * page_size
            for entry in readers:
                keys[entry.row] += max(0, min(entry.bound - first, length))
    return keys

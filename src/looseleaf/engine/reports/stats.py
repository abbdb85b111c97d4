"""Counters of an engine: sums since its start, numbers of one step, and a snapshot."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

from looseleaf.attention.plan.groups import Groups
from looseleaf.attention.plan.planner import PlanCounters
from looseleaf.engine.reports.outputs import ReuseReport
from looseleaf.index.host.attend import HostedCounters
from looseleaf.kv.store import PageCounts
from looseleaf.tiers import TierState


@dataclass
class EngineCounters(PlanCounters):
    """Sums since the start of the engine.

    ``prompt_tokens`` counts computed tokens, ``output_tokens`` sampled tokens. Requests end as
    ``finished``, ``aborted``, ``failed`` or ``deadline_exceeded``; ``preemptions`` counts outputs.

    The reuse of a prompt counts once per request, at its first admission: text tokens, text tokens
    of an exact prefix, and documents with their tokens by source. ``document_tokens_recomputed``
    counts tokens computed again by every output, at the end of the request.

    ``canaries`` counts answers that were compared with those of full prefill, ``canaries_agreed``
    the equal answers, and ``canary_raises`` the raises of ratios that followed. The work of
    canaries is part of ``steps`` and of both sums of tokens.

    ``items`` counts the runs of settled pages that decode steps read. ``grouped_items`` serve
    several rows, ``grouped_rows`` in all. ``refused_groups`` counts common runs that rows read
    separately, because that is faster. A GPU reads ``narrow_pieces`` with tiles of few rows and
    ``wide_pieces`` with tiles of many rows. ``gathered_keys`` were copied into prompt order before
    new rows read them, counted once for all layers. Rows that choose pages read ``pages_read`` of
    ``pages_held``, counted once per layer and KV head.
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
        """Add the reuse of one request."""
        self.text_tokens += report.text_tokens
        self.text_tokens_cached += report.text_tokens_cached
        for document in report.documents:
            for name, number in (("documents", 1), ("document_tokens", document.num_tokens)):
                field = f"{name}_{document.source}"
                setattr(self, field, getattr(self, field) + number)


@dataclass(frozen=True)
class StepStats:
    """The numbers of one step. ``items``, ``grouped_items`` and ``grouped_rows`` are as in
    `EngineCounters`.

    ``launched`` is the time of the first launch on the device, by `time.perf_counter`; None without
    launches."""

    seconds: float
    prompt_tokens: int
    decode_rows: int
    items: int
    grouped_items: int
    grouped_rows: int
    launched: float | None


@dataclass(frozen=True)
class EngineSnapshot:
    """The state of an engine between two steps.

    ``running`` and ``waiting`` count sequences, of which a request has ``n``. ``skipped_writes``
    counts documents that were not copied to the ``tiers``, because too many writes were pending.
    ``hosted`` counts the reads of hosted documents. ``kernels`` counts the kernels compiled or
    loaded so far, and ``graphs`` the captured graphs; both are 0 on a CPU. The first step of a kind
    waits for them."""

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
    """The number of keys that each decode row reads together with other rows, one per row."""
    keys = [0] * num_rows
    for item in groups.items:
        # rows after the newest are revised rows, whose outputs are counted already
        readers = [entry for entry in item.entries if entry.row < num_rows]
        if len(readers) > 1:
            first = item.first_page * page_size
            length = len(item.pages) * page_size
            for entry in readers:
                keys[entry.row] += max(0, min(entry.bound - first, length))
    return keys

"""Prometheus metrics of the engine: its counters, read at each scrape, and its steps."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from looseleaf import __version__
from looseleaf.engine.reports.stats import EngineCounters, EngineSnapshot, StepStats
from looseleaf.llm.async_llm import AsyncLLM
from looseleaf.server.tier_metrics import tier_metrics

_FAST = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_STEP = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# metric, help text, field of the snapshot; absent before the first read
_HOSTED = (
    ("reads", "Reads of hosted documents, per decode row, layer and query head.", "reads"),
    ("keys", "Keys of the documents in these reads.", "keys"),
    ("keys_read", "Keys that these reads attended to.", "keys_read"),
    ("keys_compared", "Vectors that index searches compared.", "keys_scanned"),
    ("searches_sampled", "Index searches whose recall was measured.", "sampled"),
    ("recall_sum", "Sum of the measured recall.", "recall_sum"),
)


class EngineMetrics:
    """The metrics of an engine, added to ``registry`` in the engine's process.

    Pass `on_step` to the engine, then call `watch`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._step = self._histogram("step_seconds", "Duration of an engine step.", _STEP)
        self._rows = self._histogram("decode_rows", "Outputs per decode step.", _ROWS)
        self._group_rows = self._histogram(
            "rows_per_group", "Mean rows of a step's work items with several rows.", _ROWS
        )
        self._decode_steps = Counter(
            "looseleaf_decode_steps",
            "Decode steps by attention path.",
            ("path",),
            registry=registry,
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _FAST
        )
        self._queued = self._histogram(
            "queue_seconds", "From a request's arrival to its admission, or to its end.", _FAST
        )

    def watch(self, llm: AsyncLLM, model: str) -> None:
        """Export the counters and latencies of the engine; ``model`` is its name for clients."""
        self._registry.register(_EngineCollector(llm.snapshot))
        accounting = llm.engine.accounting
        accounting.on_queued = self._queued.observe
        accounting.on_first_token = self._first_token.observe
        build = Info("looseleaf_build", "Version, model and dtype.", registry=self._registry)
        build.info({"version": __version__, "model": model, "dtype": llm.facts.dtype})

    def on_step(self, stats: StepStats) -> None:
        """Observe a step; called in the engine's thread."""
        self._step.observe(stats.seconds)
        if stats.decode_rows:
            self._rows.observe(stats.decode_rows)
            self._decode_steps.labels("grouped" if stats.grouped_items else "separate").inc()
        if stats.grouped_items:
            self._group_rows.observe(stats.grouped_rows / stats.grouped_items)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"looseleaf_{name}", text, buckets=buckets, registry=self._registry)


class _EngineCollector:
    """Turns a snapshot of the engine into metrics.

    The engine counts documents and text once per request, at its first admission."""

    def __init__(self, snapshot: Callable[[], EngineSnapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot()
        yield _gauge("running_outputs", "Running outputs.", now.running)
        yield _gauge("waiting_outputs", "Outputs waiting for admission.", now.waiting)
        yield _gauge("pool_pages", "Pages of the pool in every state.", now.pages.total)
        yield _gauge("segments", "Segments in the pool.", now.segments)
        yield _gauge("registered_documents", "Registered documents.", now.registered_documents)
        pages = GaugeMetricFamily("looseleaf_pages", "Pages of the pool.", labels=["state"])
        for state in ("free", "tails", "referenced", "idle", "pinned"):
            pages.add_metric([state], getattr(now.pages, state))
        yield pages
        yield _by(
            "made_ready",
            "GPU kernels compiled or loaded, and graphs captured. Growth after warm-up delays "
            "requests.",
            what={"kernels": now.kernels, "graphs": now.graphs},
        )
        yield from _sums(now)
        yield from _plan_sums(now.counters)
        yield from tier_metrics(now.tiers, now.skipped_writes)
        if now.hosted is not None and now.hosted.reads:
            for name, text, field in _HOSTED:
                yield CounterMetricFamily(
                    f"looseleaf_hosted_{name}", text, getattr(now.hosted, field)
                )


def _sums(now: EngineSnapshot) -> Iterator[Metric]:
    sums = now.counters
    for name, text in (
        ("steps", "Steps of the engine."),
        ("prompt_tokens", "Prompt tokens computed, also after preemption."),
        ("output_tokens", "Tokens sampled."),
        ("preemptions", "Outputs that were preempted and recomputed."),
        ("document_tokens_recomputed", "Document tokens recomputed by a fuse policy."),
        ("canaries", "Fused answers compared with full prefill."),
        ("canaries_agreed", "Fused answers equal to full prefill."),
        ("canary_raises", "Increases of the fuse ratio after disagreement."),
    ):
        yield CounterMetricFamily(f"looseleaf_{name}", text, getattr(sums, name))
    ends = {end: getattr(sums, end) for end in ("finished", "aborted", "failed")}
    ends["deadline"] = sums.deadline_exceeded
    yield _by("requests", "Requests that ended.", end=ends)
    for name, text in (
        ("documents", "Documents of requests, at admission."),
        ("document_tokens", "Document tokens of requests, at admission."),
    ):
        sources = ("cached", "computed", "awaited", "loaded")
        yield _by(name, text, source={s: getattr(sums, f"{name}_{s}") for s in sources})
    cached = sums.text_tokens_cached
    yield _by(
        "text_tokens",
        "Text tokens of requests, at admission.",
        source={"cached": cached, "computed": sums.text_tokens - cached},
    )
    yield _by(
        "selected_pages",
        "Pages in the context of tokens under a select policy, per layer and KV head.",
        read={"yes": sums.pages_read, "no": sums.pages_held - sums.pages_read},
    )
    yield CounterMetricFamily(
        "looseleaf_evicted_segments", "Segments evicted.", now.evicted_segments
    )
    yield CounterMetricFamily("looseleaf_evicted_pages", "Pages evicted.", now.evicted_pages)


def _plan_sums(sums: EngineCounters) -> Iterator[Metric]:
    """Counters of the attention planner."""
    yield _by(
        "work_items",
        "Page runs that decode steps read.",
        kind={"grouped": sums.grouped_items, "single": sums.items - sums.grouped_items},
    )
    yield CounterMetricFamily(
        "looseleaf_grouped_rows", "Rows of grouped work items.", sums.grouped_rows
    )
    yield CounterMetricFamily(
        "looseleaf_refused_groups",
        "Shared page runs that rows read separately, because that is faster.",
        sums.refused_groups,
    )
    yield _by(
        "work_pieces",
        "Pieces of work items, by kernel tile, on a GPU.",
        tile={"narrow": sums.narrow_pieces, "wide": sums.wide_pieces},
    )
    yield CounterMetricFamily(
        "looseleaf_gathered_keys",
        "Keys copied into prompt order for prefill, on a GPU.",
        sums.gathered_keys,
    )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"looseleaf_{name}", text, value)


def _by(name: str, text: str, **labelled: Mapping[str, float]) -> Metric:
    """A counter with one label: ``label={value: count}``."""
    ((label, counts),) = labelled.items()
    family = CounterMetricFamily(f"looseleaf_{name}", text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family

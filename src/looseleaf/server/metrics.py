"""Prometheus metrics: the engine's counters, read at each scrape, and latencies of requests."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from looseleaf.engine.reports.outputs import LoadingReport, RequestOutput
from looseleaf.engine.reports.stats import EngineCounters, EngineSnapshot, StepStats
from looseleaf.server.tier_metrics import tier_metrics

_FAST = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_STEP = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
_LONG = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
_SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1)
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


class ServerMetrics:
    """All metrics of one server, in a separate registry."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, snapshot: Callable[[], EngineSnapshot]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(snapshot))
        ProcessCollector(registry=self._registry)
        self.build = Info("looseleaf_build", "Version, model and dtype.", registry=self._registry)
        self._add_request_metrics()
        self._add_step_metrics()
        self._add_document_metrics()

    def _add_request_metrics(self) -> None:
        """Times, responses and errors of requests."""
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _FAST
        )
        self.per_token = self._histogram(
            "time_per_output_token_seconds", "Mean time between tokens of a finished answer.", _STEP
        )
        self.queued = self._histogram(
            "queue_seconds", "From a request's arrival to its admission, or to its end.", _FAST
        )
        self.total = self._histogram(
            "request_seconds", "From a finished request's arrival to its last token.", _LONG
        )
        self.responses = self._counter("http_responses", "HTTP responses.", "route", "status")
        self.disconnects = self._counter("disconnects", "Requests whose client disconnected.")
        self.refused_connections = self._counter(
            "refused_connections", "Connections closed because too many were open."
        )
        self.faults = self._counter("faults", "Requests that failed by a fault of the server.")
        self.limits = self._counter(
            "limits_exceeded",
            "Requests whose template, tokenizer or grammar exceeded its time, memory or output.",
            "what",
        )
        self.under_way = Gauge(
            "looseleaf_http_requests", "HTTP requests under way.", registry=self._registry
        )

    def _add_step_metrics(self) -> None:
        """Duration and batch sizes of engine steps."""
        self.step = self._histogram("step_seconds", "Duration of an engine step.", _STEP)
        self.rows = self._histogram("decode_rows", "Outputs per decode step.", _ROWS)
        self.group_rows = self._histogram(
            "rows_per_group", "Mean rows of a step's work items with several rows.", _ROWS
        )
        self.decode_steps = self._counter("decode_steps", "Decode steps by attention path.", "path")

    def _add_document_metrics(self) -> None:
        """Registration and loading of documents."""
        self.not_kept = self._counter(
            "not_kept",
            "Changes to registered documents that could not be written to the disk, and ready "
            "documents whose keys and values were not (keys).",
            "change",
        )
        self.left_out = self._counter(
            "registrations_left_out", "Records that a start did not register again."
        )
        self.loading = self._histogram(
            "loading_seconds",
            "Seconds until documents were loaded from tiers (load) and until the first token "
            "(total), predicted by the controller and actual.",
            _FAST, "until", "time",
        )  # fmt: skip
        self.chosen_ratio = self._histogram(
            "chosen_ratio", "Share of tokens that the controller recomputes.", _SHARES
        )

    def watch_engine(self, is_up: Callable[[], bool], busy: Callable[[], float]) -> None:
        """Export at each scrape whether the engine runs, and the age of its current step."""
        for name, text, value in (
            ("engine_up", "1 while the engine runs; 0 if it is stuck or has ended.", is_up),
            ("engine_busy_seconds", "Age of the running step; 0 between steps.", busy),
        ):
            Gauge(f"looseleaf_{name}", text, registry=self._registry).set_function(value)

    def on_step(self, stats: StepStats) -> None:
        """Observe a step; called in the engine's thread."""
        self.step.observe(stats.seconds)
        if stats.decode_rows:
            self.rows.observe(stats.decode_rows)
            self.decode_steps.labels("grouped" if stats.grouped_items else "separate").inc()
        if stats.grouped_items:
            self.group_rows.observe(stats.grouped_rows / stats.grouped_items)

    def on_finish(self, output: RequestOutput) -> None:
        """Observe the latencies of a finished request.

        Queue time and first token are observed earlier, also for unfinished requests."""
        times = output.metrics
        if times.first_token is None or times.finished is None:
            return
        self.total.observe(times.finished)
        if output.reuse.loading is not None:
            self._on_loading(output.reuse.loading)
        longest = max(len(choice.token_ids) for choice in output.outputs)
        if longest > 1:
            self.per_token.observe((times.finished - times.first_token) / (longest - 1))

    def _on_loading(self, report: LoadingReport) -> None:
        """Observe predicted and actual loading times, where both are known."""
        for until in ("load", "total"):
            predicted = getattr(report, f"{until}_predicted")
            actual = getattr(report, f"{until}_seconds")
            if predicted is not None and actual is not None:
                self.loading.labels(until, "predicted").observe(predicted)
                self.loading.labels(until, "actual").observe(actual)
        if report.ratio is not None:
            self.chosen_ratio.observe(report.ratio)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(
            f"looseleaf_{name}", text, labels, buckets=buckets, registry=self._registry
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"looseleaf_{name}", text, labels, registry=self._registry)


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

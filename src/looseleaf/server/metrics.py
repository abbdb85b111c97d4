"""Prometheus metrics: what the engine counts, read at each scrape, and how long requests take."""

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
# what decoding read of hosted documents; nothing before the first read
_HOSTED = (
    ("reads", "Reads of hosted documents by decoding rows, layers and query heads.", "reads"),
    ("keys", "Keys that these reads had before them.", "keys"),
    ("keys_read", "Keys that they attended to.", "keys_read"),
    ("keys_compared", "Vectors that their searches compared.", "keys_scanned"),
    ("searches_sampled", "Searches whose recall was measured.", "sampled"),
    ("recall_sum", "Sum of these searches' recall.", "recall_sum"),
)


class ServerMetrics:
    """All metrics of one server, in a registry of its own."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, snapshot: Callable[[], EngineSnapshot]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(snapshot))
        ProcessCollector(registry=self._registry)
        self.build = Info("looseleaf_build", "What serves.", registry=self._registry)
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _FAST
        )
        self.per_token = self._histogram(
            "time_per_output_token_seconds", "Mean time between a whole answer's tokens.", _STEP
        )
        self.queued = self._histogram(
            "queue_seconds",
            "From a request's arrival to its admission, or to its end if it never was admitted.",
            _FAST,
        )
        self.total = self._histogram(
            "request_seconds",
            "From the arrival of a request that finished to its last token.",
            _LONG,
        )
        self.step = self._histogram("step_seconds", "What a step takes.", _STEP)
        self.rows = self._histogram("decode_rows", "Outputs that one step decodes.", _ROWS)
        self.group_rows = self._histogram(
            "rows_per_group", "Mean rows of a step's work items that serve several.", _ROWS
        )
        self.decode_steps = self._counter(
            "decode_steps", "Decode steps by the path that attention took.", "path"
        )
        self.responses = self._counter("http_responses", "HTTP responses.", "route", "status")
        self.disconnects = self._counter("disconnects", "Requests whose caller went away.")
        self.refused_connections = self._counter(
            "refused_connections", "Connections that were closed since too many were open."
        )
        self.faults = self._counter("faults", "Requests that failed by a fault of the server.")
        self.limits = self._counter(
            "limits_exceeded",
            "Requests whose template, tokenizer or grammar took more time, memory or output than "
            "it may.",
            "what",
        )
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
            "For a request whose documents came from tiers: until these were there (load), and "
            "until its first token (total), as the controller predicted it and as it was.",
            _FAST, "until", "time",
        )  # fmt: skip
        self.chosen_ratio = self._histogram(
            "chosen_ratio", "Share of tokens that the controller chose to compute again.", _SHARES
        )
        self.under_way = Gauge(
            "looseleaf_http_requests", "HTTP requests under way.", registry=self._registry
        )

    def watch_engine(self, is_up: Callable[[], bool], busy: Callable[[], float]) -> None:
        """Show at each scrape whether the engine goes on, and how long its step has taken."""
        up, age = (
            Gauge(f"looseleaf_{name}", text, registry=self._registry)
            for name, text in (
                ("engine_up", "1 while the engine goes on; 0 once it stands still or has ended."),
                ("engine_busy_seconds", "What the step under way has taken; 0 where none is."),
            )
        )
        up.set_function(is_up)
        age.set_function(busy)

    def on_step(self, stats: StepStats) -> None:
        """Book a step; called in the engine's thread."""
        self.step.observe(stats.seconds)
        if stats.decode_rows:
            self.rows.observe(stats.decode_rows)
            self.decode_steps.labels("grouped" if stats.grouped_items else "separate").inc()
        if stats.grouped_items:
            self.group_rows.observe(stats.grouped_rows / stats.grouped_items)

    def on_finish(self, output: RequestOutput) -> None:
        """Book the times of a whole answer. How long a request waited, and its first token, are
        observed as they come: of those that do not finish, too."""
        times = output.metrics
        if times.first_token is None or times.finished is None:
            return
        self.total.observe(times.finished)
        if output.reuse.loading is not None:
            self._on_loading(output.reuse.loading)
        longest = max(len(one.token_ids) for one in output.outputs)
        if longest > 1:
            self.per_token.observe((times.finished - times.first_token) / (longest - 1))

    def _on_loading(self, report: LoadingReport) -> None:
        """Book what the loading controller expected beside what it was, where both are known."""
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
    """Turns a snapshot of the engine into metrics. Nothing is counted twice: documents and text
    are booked by the engine, once a request, at its first admission."""

    def __init__(self, snapshot: Callable[[], EngineSnapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot()
        yield _gauge("running_outputs", "Outputs that run.", now.running)
        yield _gauge("waiting_outputs", "Outputs that wait for a place.", now.waiting)
        yield _gauge("pool_pages", "Pages of the pool, whatever their state.", now.pages.total)
        yield _gauge("segments", "Segments in the pool.", now.segments)
        yield _gauge("registered_documents", "Registered documents.", now.registered_documents)
        pages = GaugeMetricFamily("looseleaf_pages", "Pages of the pool.", labels=["state"])
        for state in ("free", "tails", "referenced", "idle", "pinned"):
            pages.add_metric([state], getattr(now.pages, state))
        yield pages
        yield _by(
            "made_ready",
            "GPU kernels compiled or loaded, and graphs captured, so far. What grows once a server "
            "is warm was waited for by a request.",
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
        ("prompt_tokens", "Prompt tokens computed, those of preempted outputs included."),
        ("output_tokens", "Tokens drawn."),
        ("preemptions", "Outputs that had to make room and were computed again."),
        (
            "document_tokens_recomputed",
            "Document tokens computed again for one output, by its fuse policy.",
        ),
        ("canaries", "Answers of fused requests that were compared with full prefill's."),
        ("canaries_agreed", "Those of them that were the same."),
        ("canary_raises", "How often ratios were raised because too few agreed."),
    ):
        yield CounterMetricFamily(f"looseleaf_{name}", text, getattr(sums, name))
    ends = {end: getattr(sums, end) for end in ("finished", "aborted", "failed")}
    ends["deadline"] = sums.deadline_exceeded
    yield _by("requests", "Requests that ended.", end=ends)
    for name, text in (
        ("documents", "Documents of requests, at admission."),
        ("document_tokens", "Their tokens, at admission."),
    ):
        sources = ("cached", "computed", "awaited", "loaded")
        yield _by(name, text, source={s: getattr(sums, f"{name}_{s}") for s in sources})
    cached = sums.text_tokens_cached
    yield _by(
        "text_tokens",
        "Tokens of text, at admission.",
        source={"cached": cached, "computed": sums.text_tokens - cached},
    )
    yield _by(
        "selected_pages",
        "Pages that tokens of requests with a select policy had before them, once a layer and KV "
        "head.",
        read={"yes": sums.pages_read, "no": sums.pages_held - sums.pages_read},
    )
    yield CounterMetricFamily(
        "looseleaf_evicted_segments", "Segments evicted.", now.evicted_segments
    )
    yield CounterMetricFamily("looseleaf_evicted_pages", "Pages evicted.", now.evicted_pages)


def _plan_sums(sums: EngineCounters) -> Iterator[Metric]:
    """What the planner of attention chose."""
    yield _by(
        "work_items",
        "Runs of pages that decode steps read.",
        kind={"grouped": sums.grouped_items, "single": sums.items - sums.grouped_items},
    )
    yield CounterMetricFamily(
        "looseleaf_grouped_rows", "Rows that grouped work items served.", sums.grouped_rows
    )
    yield CounterMetricFamily(
        "looseleaf_refused_groups",
        "Stretches of pages that rows have in common and read alone, since that is faster.",
        sums.refused_groups,
    )
    yield _by(
        "work_pieces",
        "What work items were cut into, by the tile that reads it; on a GPU.",
        tile={"narrow": sums.narrow_pieces, "wide": sums.wide_pieces},
    )
    yield CounterMetricFamily(
        "looseleaf_gathered_keys",
        "Keys laid out in the order of a prompt before its new rows read them; on a GPU.",
        sums.gathered_keys,
    )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"looseleaf_{name}", text, value)


def _by(name: str, text: str, **labelled: Mapping[str, float]) -> Metric:
    """A counter with one label, and its value for each of the label's."""
    ((label, values),) = labelled.items()
    family = CounterMetricFamily(f"looseleaf_{name}", text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family

"""Prometheus metrics of HTTP requests: counts, latencies and errors of one API process."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from looseleaf.engine.reports.outputs import LoadingReport
from looseleaf.llm.client import Output

_FAST = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_STEP = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
_LONG = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
_SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1)


class ServerMetrics:
    """The metrics of requests, in the separate ``registry`` of a process."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._add_request_metrics()
        self._add_document_metrics()

    def _add_request_metrics(self) -> None:
        """Times, responses and errors of requests."""
        self.per_token = self._histogram(
            "time_per_output_token_seconds", "Mean time between tokens of a finished answer.", _STEP
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
            "looseleaf_http_requests", "HTTP requests under way.", registry=self.registry
        )

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
        self.seen_texts = self._counter(
            "document_texts_seen", "Documents sent as text whose tokens an earlier request had."
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
            Gauge(f"looseleaf_{name}", text, registry=self.registry).set_function(value)

    def on_finish(self, output: Output) -> None:
        """Observe the latencies of a finished request.

        `EngineMetrics` observes queue time and first token, also of unfinished requests."""
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
        return generate_latest(self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(f"looseleaf_{name}", text, labels, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"looseleaf_{name}", text, labels, registry=self.registry)

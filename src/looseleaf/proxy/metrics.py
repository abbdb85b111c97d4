"""Prometheus metrics of the proxy. They count requests of all tenants and name none."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)


class ProxyMetrics:
    """The metrics of one proxy, in a registry of their own."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.sent = self._counter("requests", "Requests sent to replicas.", "replica")
        self.responses = self._counter("responses", "Responses to clients.", "status")
        self.retries = self._counter(
            "retries",
            "Requests sent to another replica, because one was lost or refused (busy, without a "
            "registered document).",
            "reason",
        )
        self.cut = self._counter("streams_cut", "Streams that ended with an error of the proxy.")
        self.resent = self._counter(
            "registrations_resent", "Registrations sent again to a replica without the document."
        )
        self.tokens = self._counter("document_tokens", "Tokens of requests' documents, estimated.")
        self.held_tokens = self._counter(
            "document_tokens_held", "Tokens of documents that the chosen replica reported to hold."
        )
        self.refused_connections = self._counter(
            "refused_connections", "Connections closed because too many were open."
        )
        self.running = self._gauge("requests_in_flight", "Requests in flight.")
        self.up = self._gauge("replicas_up", "Replicas that answer.")
        self.first_byte = Histogram(
            "looseleaf_route_first_byte_seconds",
            "From a request's arrival to the first byte of its answer.",
            buckets=_SECONDS,
            registry=self.registry,
        )

    def render(self) -> bytes:
        """The metrics in Prometheus' format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"looseleaf_route_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"looseleaf_route_{name}", text, registry=self.registry)

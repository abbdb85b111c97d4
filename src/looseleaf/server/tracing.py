"""Optional OpenTelemetry traces: one span per request, with its reuse counts."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from looseleaf.errors import InvalidOption, install


class Tracer:
    """A tracer without an exporter."""

    @contextmanager
    def span(self, name: str, headers: Mapping[str, str]) -> Iterator["Span"]:
        """A span around a request; ``headers`` may contain the parent trace."""
        yield Span()

    def close(self) -> None:
        """Export the remaining spans."""


class Span:
    """A span without an exporter."""

    def set(self, **attributes: Any) -> None:
        """Set attributes, under names that begin with ``looseleaf.``."""


def make_tracer(enabled: bool) -> Tracer:
    """A tracer that exports over OTLP if ``enabled``, to the address in ``OTEL_`` variables."""
    if not enabled:
        return Tracer()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InvalidOption(f"--tracing needs OpenTelemetry: {install('tracing')}") from error
    provider = TracerProvider(resource=Resource.create({"service.name": "looseleaf"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return ProviderTracer(provider)


@dataclass(eq=False)
class ProviderTracer(Tracer):
    """Spans of an OpenTelemetry provider."""

    provider: Any

    @contextmanager
    def span(self, name: str, headers: Mapping[str, str]) -> Iterator[Span]:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract(dict(headers))
        tracer = self.provider.get_tracer("looseleaf")
        with tracer.start_as_current_span(name, context=context, kind=SpanKind.SERVER) as span:
            yield _ProviderSpan(span)

    def close(self) -> None:
        self.provider.shutdown()


@dataclass(eq=False)
class _ProviderSpan(Span):
    span: Any

    def set(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            if value is not None:
                self.span.set_attribute(f"looseleaf.{name}", value)

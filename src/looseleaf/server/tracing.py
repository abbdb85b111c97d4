"""Optional OpenTelemetry traces: one span a request, with what it reused."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from looseleaf.errors import InvalidOption, install


class Tracer:
    """Spans that nobody collects."""

    @contextmanager
    def span(self, name: str, headers: Mapping[str, str]) -> Iterator["Span"]:
        """A span around a request; ``headers`` may name the caller's trace."""
        yield Span()

    def close(self) -> None:
        """Send what is left."""


class Span:
    """Takes what is told about a request, and forgets it."""

    def set(self, **attributes: Any) -> None:
        """Facts about the request, under names that begin with ``looseleaf.``."""


def make_tracer(enabled: bool) -> Tracer:
    """A tracer that exports over OTLP if ``enabled``; the OTEL_ variables say where to."""
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
    """Spans of an OpenTelemetry provider of this server's own."""

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

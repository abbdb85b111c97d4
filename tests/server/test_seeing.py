"""The log and the traces: one entry a request, with its id and its numbers, without its text."""

import io
import json
import logging
from collections.abc import Sequence
from typing import Any, Literal

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from looseleaf.config import ServerConfig
from looseleaf.server.logs import forward_logging, make_log
from looseleaf.server.tracing import ProviderTracer, Tracer, make_tracer
from tests.server.live import DOCUMENT, Live

PARENT = "0af7651916cd43dd8448eb211c80319c"


class Kept(SpanExporter):
    """Keeps the spans that it gets."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS


def test_a_request_is_one_line_with_its_id_and_no_text_of_its_own(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(live.service, "log", make_log(ServerConfig(), stream))
    response = live.chat(documents=[{"text": DOCUMENT}])
    live.client.get("/health")
    live.wait_until_idle()
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert entry["request_id"] == response.headers["x-request-id"]
    assert entry["status"] == 200
    assert entry["output_tokens"] == response.json()["usage"]["completion_tokens"]
    assert "Tolland" not in line


def test_a_span_has_the_numbers_of_its_request_and_joins_the_callers_trace(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, provider = Kept(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(live.service, "tracer", ProviderTracer(provider))
    parent = {"traceparent": f"00-{PARENT}-b7ad6b7169203331-01"}
    answer = live.client.get("/v1/models", headers=parent)
    live.chat(documents=[{"text": DOCUMENT}])
    live.wait_until_idle()
    models, chat = kept.spans
    assert models.name == "GET /v1/models"
    assert format(models.context.trace_id, "032x") == PARENT
    facts: Any = models.attributes
    assert facts["looseleaf.request_id"] == answer.headers["x-request-id"]
    facts = chat.attributes
    assert facts["looseleaf.status"] == 200
    assert facts["looseleaf.prompt_tokens"] > 0


def test_without_tracing_there_are_no_spans() -> None:
    tracer = make_tracer(False)
    assert type(tracer) is Tracer
    with tracer.span("nothing", {}) as span:
        span.set(anything=1)
    tracer.close()


def test_tracing_exports_over_otlp() -> None:
    tracer = make_tracer(True)
    assert isinstance(tracer, ProviderTracer)
    tracer.close()


def test_who_is_told_not_to_wait_hears_of_no_faults() -> None:
    stream, other, ending = io.StringIO(), logging.getLogger("uvicorn.error"), []
    with forward_logging(make_log(ServerConfig(), stream), lambda: bool(ending)):
        other.error("before")
        ending.append(True)
        other.error("behind")
    assert "before" in stream.getvalue() and "behind" not in stream.getvalue()


def test_what_is_said_again_and_again_is_counted_and_said_once_in_a_while() -> None:
    stream, other = io.StringIO(), logging.getLogger("asyncio")
    with forward_logging(make_log(ServerConfig(), stream)):
        for second in (0, 1, 2, 4, 10, 11, 30):
            given = {"name": other.name, "levelno": 40, "created": 1000.0 + second}
            other.handle(logging.makeLogRecord({**given, "msg": "no descriptor is left"}))
            if second == 2:
                other.handle(logging.makeLogRecord({**given, "msg": "another trouble"}))
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    told = [(line["text"], line.get("repeats", 0)) for line in lines]
    again = "no descriptor is left"
    assert told == [(again, 0), ("another trouble", 0), (again, 3), (again, 1)]


@pytest.mark.parametrize("form", ["json", "console"])
def test_what_python_loggers_say_is_a_line_of_the_log(
    form: Literal["json", "console"],
) -> None:
    stream, other = io.StringIO(), logging.getLogger("looseleaf.tiers.guard")
    with forward_logging(make_log(ServerConfig(log_format=form), stream)):
        other.warning("the %s tier is full", "disk")
        other.log(37, "odd")
        try:
            raise ValueError("planted")
        except ValueError:
            other.exception("a fault")
    said = stream.getvalue()
    assert "planted" in said and "the disk tier is full" in said
    if form == "json":
        first, odd, fault = (json.loads(line) for line in said.splitlines())
        assert (first["level"], first["logger"]) == ("warning", other.name)
        assert (odd["text"], fault["level"]) == ("odd", "error")
    assert not [
        h for h in logging.getLogger().handlers if type(h).__module__.startswith("looseleaf")
    ]

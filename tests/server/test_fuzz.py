"""Requests made from the server's own description of its API: no fault, no hang, no leak, and
answers as described."""

import os

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance

from tests.server.live import Live, live_server

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "25"))
PATHS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/documents"),
    ("GET", "/v1/documents"),
    ("GET", "/v1/documents/{document_id}"),
    ("DELETE", "/v1/documents/{document_id}"),
    ("POST", "/v1/documents/{document_id}/pin"),
    ("DELETE", "/v1/documents/{document_id}/pin"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("POST", "/tokenize"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
]


@pytest.fixture(scope="module")
def fuzzed() -> Live:
    """A server of its own: what strangers register must not disturb other tests."""
    with live_server(config={"deadline": 5.0}) as live:
        yield live


def test_every_endpoint_of_the_description_is_fuzzed(fuzzed: Live) -> None:
    paths = fuzzed.client.get("/openapi.json").json()["paths"]
    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert described == set(PATHS)


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_no_request_makes_a_fault_or_loses_a_page(fuzzed: Live, method: str, path: str) -> None:
    description = fuzzed.client.get("/openapi.json").json()
    operation = schemathesis.openapi.from_dict(description)[path][method]

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: schemathesis.Case) -> None:
        response = case.call(base_url=fuzzed.url, timeout=20)
        case.validate_response(response, checks=[not_a_server_error, response_schema_conformance])

    given(case=operation.as_strategy())(ask)()
    fuzzed.wait_until_idle()

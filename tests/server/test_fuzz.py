"""Requests made from the server's own description of its API: no fault, no hang, no leak, and
answers as described."""

import os
from collections import Counter

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings, strategies
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance

from looseleaf.server.service import REFERENCE_NAME
from tests.server.live import Live, live_server

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "30"))
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


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize(("method", "path"), PATHS)
def test_no_request_makes_a_fault_or_loses_a_page(
    fuzzed: Live, method: str, path: str, mode: GenerationMode
) -> None:
    description = fuzzed.client.get("/openapi.json").json()
    operation = schemathesis.openapi.from_dict(description)[path][method]
    if mode.is_negative and method == "GET" and "{" not in path:
        pytest.skip("nothing of it can be wrong")
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), known=strategies.integers(0, 3))
    def ask(case: schemathesis.Case, known: int) -> None:
        if known and isinstance(case.body, dict) and "model" in case.body:
            # a name drawn at random is hardly ever one that is served
            case.body["model"] = REFERENCE_NAME
        response = case.call(base_url=fuzzed.url, timeout=20)
        case.validate_response(response, checks=[not_a_server_error, response_schema_conformance])
        statuses[response.status_code] += 1

    ask()
    fuzzed.wait_until_idle()
    if mode.is_negative or "{" in path:
        assert statuses.total() > statuses[200], statuses
    else:
        assert statuses[200] + statuses[201] + statuses[202], statuses

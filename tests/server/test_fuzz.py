"""Requests made from the server's own description of its API: no fault, no hang, no leak, and
answers as described."""

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings, strategies
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance

from looseleaf.server.names import REFERENCE_NAME
from tests.server.live import Live, live_server

# the server runs in this process, and its threads draw random numbers while examples are made
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")

NEEDED = ("messages", "prompt", "text", "input", "max_tokens")
LIMITS = {"/v1/messages": "max_tokens", "/v1/responses": "max_output_tokens"}
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "25"))
TRANSLATED = ("/v1/messages", "/v1/responses")
"""Paths whose requests become chat requests: fewer examples, as those are fuzzed themselves."""

PATHS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/input_tokens"),
    ("GET", "/v1/responses/{response_id}"),
    ("GET", "/v1/responses/{response_id}/input_items"),
    ("POST", "/v1/responses/{response_id}/cancel"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("POST", "/v1/documents"),
    ("GET", "/v1/documents"),
    ("GET", "/v1/documents/{document_id}"),
    ("DELETE", "/v1/documents/{document_id}"),
    ("POST", "/v1/documents/{document_id}/pin"),
    ("DELETE", "/v1/documents/{document_id}/pin"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"),
    ("GET", "/v1/holdings"),
    ("GET", "/version"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
]


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Live]:
    """A server of its own: what strangers register must not disturb other tests."""
    with live_server(config={"deadline": 5.0}) as live:
        yield live


def test_every_endpoint_of_the_description_is_fuzzed(fuzzed: Live) -> None:
    paths = fuzzed.client.get("/openapi.json").json()["paths"]
    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert described == set(PATHS)


def likelier(body: dict[str, Any], kept: set[int], completes: bool) -> dict[str, Any]:
    """A body that is not refused for its model's name, or for fields that contradict each other:
    drawn at random they nearly always do."""
    fields = [f for n, f in enumerate(body.items()) if n in kept or f[0] in NEEDED]
    limit = {"max_tokens": 4} if completes else {}
    return {**limit, **dict(fields), "model": REFERENCE_NAME}


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
        max_examples=max(1, EXAMPLES // 3) if path.startswith(TRANSLATED) else EXAMPLES,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        case=operation.as_strategy(generation_mode=mode),
        known=strategies.integers(0, 3),
        kept=strategies.sets(strategies.integers(0, 30), max_size=3),
    )
    def ask(case: schemathesis.Case, known: int, kept: set[int]) -> None:
        if known and isinstance(case.body, dict) and "model" in case.body:
            case.body = likelier(case.body, kept, "completions" in path)
            asks = known == 1 or (known == 3 and path in LIMITS)
            for name in {"messages", "input"} & case.body.keys() if asks else ():
                case.body[name] = [{"role": "user", "content": "Where is the archive?"}]
            if asks and "prompt" in case.body:
                case.body["prompt"] = "Where is the archive?"
            if path in LIMITS:
                case.body[LIMITS[path]] = 4
        response = case.call(base_url=fuzzed.url, timeout=20)
        case.validate_response(response, checks=[not_a_server_error, response_schema_conformance])
        statuses[response.status_code] += 1

    ask()
    fuzzed.wait_until_idle()
    if mode.is_negative or "{" in path:
        assert statuses.total() > statuses[200], statuses
    else:
        assert statuses[200] + statuses[201] + statuses[202], statuses

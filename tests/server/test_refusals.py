"""What is refused is seen for what it is: under its route in the metrics, with its code and the
caller's own label in the log."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from looseleaf import __version__
from looseleaf.config import ServerConfig
from looseleaf.server.logs import make_log
from looseleaf.server.names import REFERENCE_NAME
from tests.server.conftest import KEYS
from tests.server.live import Live, bearer, chat_body, live_server
from tests.server.metering import counted

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that takes two requests of a key in a minute, and small bodies."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("".join(f"{t}={k}\n" for t, k in KEYS.items()), "utf-8")
    limits = {"requests_per_minute": 2, "max_body_mib": 0.01, "open_metrics": True}
    with live_server(config={"api_keys": str(path), **limits}) as server:
        yield server


def lines(live: Live, stream: io.StringIO) -> list[dict[str, Any]]:
    live.wait_until_idle()
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_what_the_gate_refuses_is_counted_under_its_route(strict: Live) -> None:
    key = KEYS["red"]
    assert strict.post(CHAT, chat_body()).status_code == 401
    large = chat_body(messages=[{"role": "user", "content": "x" * 20_000}])
    assert strict.post(CHAT, large, headers=bearer(key)).status_code == 413
    assert [strict.chat(key=key, max_tokens=1).status_code for _ in range(3)] == [200, 200, 429]
    assert strict.client.get("/v1/documents/mine").status_code == 401
    assert strict.client.get("/v1/nothing").status_code == 401
    values = counted(strict)

    def responses(route: str, status: int) -> float:
        return values[f'looseleaf_http_responses_total{{route="{route}",status="{status}"}}']

    assert {status: responses(CHAT, status) for status in (200, 401, 413, 429)} == {
        200: 2, 401: 1, 413: 1, 429: 1
    }  # fmt: skip
    assert responses("/v1/documents/{document_id}", 401) == 1
    assert responses("other", 401) == 1


def test_a_refusal_is_logged_with_its_code(strict: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(strict.service, "log", make_log(ServerConfig(), stream))
    strict.post(CHAT, chat_body())
    for _ in range(3):
        strict.client.get("/v1/documents/none", headers=bearer(KEYS["blue"]))
    codes = [line["code"] for line in lines(strict, stream)]
    assert codes == ["invalid_api_key", *["document_not_found"] * 2, "rate_limit_exceeded"]


def test_a_callers_label_is_in_the_log(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(live.service, "log", make_log(ServerConfig(), stream))
    assert live.chat(user="u-123", max_tokens=1).status_code == 200
    assert live.chat(user="u-124", model="unknown").status_code == 404
    body = {"model": REFERENCE_NAME, "prompt": "x", "user": "u-125", "max_tokens": 10_000}
    assert live.post("/v1/completions", body).status_code == 400
    assert live.post("/v1/completions", {"prompt": 3}).status_code == 400
    labels = [(line.get("user"), line.get("code")) for line in lines(live, stream)]
    assert labels == [
        ("u-123", None),
        ("u-124", "model_not_found"),
        ("u-125", "context_length_exceeded"),
        (None, "invalid_value"),
    ]


def test_an_error_in_a_stream_is_logged_with_its_code(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(live.service, "log", make_log(ServerConfig(), stream))
    body = chat_body(stream=True, deadline=1.5, max_tokens=3000, ignore_eos=True)
    live.events(CHAT, body)
    (line,) = lines(live, stream)
    assert (line["status"], line["code"]) == (200, "deadline_exceeded")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the figures come from /proc")
def test_the_process_and_the_build_are_in_the_metrics(live: Live) -> None:
    values = counted(live)
    assert values["process_open_fds"] > 0
    assert values["process_resident_memory_bytes"] > 2**20
    labels = f'dtype="float32",model="{REFERENCE_NAME}",version="{__version__}"'
    assert values[f"looseleaf_build_info{{{labels}}}"] == 1


def test_what_is_not_here_of_openais_api_is_refused_by_its_path(live: Live) -> None:
    for path in ("/v1/conversations", "/v1/embeddings"):
        refused = live.post(path, {"model": REFERENCE_NAME, "input": "Who signs?"})
        assert refused.status_code == 404
        assert path in refused.json()["error"]["message"]
    refused = live.client.delete(f"/v1/models/{REFERENCE_NAME}")
    assert refused.status_code == 405
    assert REFERENCE_NAME in refused.json()["error"]["message"]

"""Schemas and templates that ask too much: a sentence, a count, and a server that ends."""

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from looseleaf.llm.load import find_model
from looseleaf.models.tokenizer import chat_template
from looseleaf.sandbox import Limits
from looseleaf.server.service import Service
from tests.server.live import Live, chat_body, live_server
from tests.server.test_drain import started

ENDLESS = (
    "{% if 'loop' in messages[-1].content %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}{{ messages[-1].content * 1 }}<|assistant|>"
)


class Panic(BaseException):
    """As Rust libraries raise it."""


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def properties(number: int) -> dict[str, Any]:
    half = {f"p{n}": {"type": "string"} for n in range(number // 2)}
    rest = {f"q{n}": {"type": "string"} for n in range(number - number // 2)}
    return {"anyOf": [{"type": "object", "properties": part} for part in (half, rest)]}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (properties(1001), "the JSON schema has 1001 properties, above the limit of 1000: remove"),
        (nested(48), "the JSON schema has 49 levels, above the limit of 48: nest"),
        ({"enum": ["x" * 2**17]}, "bytes, above the limit of 131072: shorten it"),
    ],
    ids=["properties", "depth", "bytes"],
)
def test_a_schema_over_a_limit_is_refused_at_once(live: Live, schema: Any, words: str) -> None:
    processes = live.service.llm.engine.grammars.sandbox.pids
    response = live.chat(response_format=schema_format(schema))
    assert response.status_code == 400
    error = response.json()["error"]
    assert words in error["message"]
    assert (error["code"], error["param"]) == ("schema_too_large", "response_format")
    # before anything was compiled for it
    assert live.service.llm.engine.grammars.sandbox.pids == processes


def looping_model(folder: Path) -> Path:
    """The reference model with a template that loops where a message says so."""
    source = find_model(None)
    for path in source.iterdir():
        if path.is_file():
            (folder / path.name).symlink_to(path)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").unlink()
    written = json.dumps({**settings, "chat_template": ENDLESS})
    (folder / "tokenizer_config.json").write_text(written)
    return folder


def said(text: str, **fields: Any) -> dict[str, Any]:
    return chat_body(messages=[{"role": "user", "content": text}], model="m", **fields)


@contextmanager
def looping_server(folder: Path, **config: Any) -> Iterator[Live]:
    with live_server(looping_model(folder), {"served_model_name": "m", **config}) as server:
        yield server


def test_a_template_that_loops_is_a_400_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "_LIMITS", Limits(seconds=0.2))
    with looping_server(tmp_path) as server:
        for path in ("/v1/chat/completions", "/tokenize"):
            fields = said("loop")
            body = fields if "chat" in path else {k: fields[k] for k in ("model", "messages")}
            response = server.post(path, body)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["code"] == "limit_exceeded"
            assert error["message"].startswith("this model's chat template took more than 0.2 s")
        text = server.client.get("/metrics").text
        assert 'looseleaf_limits_exceeded_total{what="template"} 2.0' in text
        assert server.post("/v1/chat/completions", said("Who?")).status_code == 200
        sandboxes = server.service.llm.engine.sandboxes
    assert all(sandbox.pids == [] for sandbox in sandboxes)


def test_a_template_that_loops_keeps_to_the_deadline_and_delays_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "_LIMITS", Limits(seconds=3.0))
    with looping_server(tmp_path) as server:
        answers: list[httpx.Response] = []

        def ask() -> None:
            answers.append(server.post("/v1/chat/completions", said("loop", deadline=0.5)))

        asking = [threading.Thread(target=ask) for _ in range(8)]
        for thread in asking:
            thread.start()
        # in none of the threads that the template holds
        assert server.client.get("/ready").status_code == 200
        assert server.client.get("/metrics").status_code == 200
        for thread in asking:
            thread.join()
        assert [answer.status_code for answer in answers] == [408] * 8
        assert "deadline" in answers[0].json()["error"]["message"]


def test_a_server_whose_template_loops_ends_within_its_drain(tmp_path: Path) -> None:
    arguments = (str(looping_model(tmp_path)), "--served-model-name", "m", "--drain-seconds", "0.5")
    process, url = started(*arguments, plant=PATIENT)
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        failed: list[Any] = []

        def ask() -> None:
            try:
                failed.append(client.post("/v1/chat/completions", json=said("loop")).status_code)
            except httpx.HTTPError as error:
                failed.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as other:
            while "looseleaf_http_requests 2.0" not in other.get("/metrics").text:
                pass
        process.send_signal(signal.SIGTERM)
        # far less than the template has
        process.communicate(timeout=60)
        thread.join()
    assert process.returncode == 5
    assert failed and failed != [200]


PATIENT = """
from looseleaf.models.tokenizer import chat_template
from looseleaf.sandbox import Limits
chat_template._LIMITS = Limits(seconds=600.0)
"""


def test_a_panic_is_a_fault_in_the_shape_of_all_errors(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(*_: object) -> None:
        raise Panic("retry-limit-in-match over")

    before = live.service.metrics.faults._value.get()
    with monkeypatch.context() as patch:
        patch.setattr(Service, "prompts", panic)
        response = live.chat()
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert live.service.metrics.faults._value.get() == before + 1
    assert live.chat().status_code == 200

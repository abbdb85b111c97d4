"""Bodies that are large and wrong are refused at the cost of reading them, with one error told."""

import time
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from looseleaf.server.body import parse_json
from looseleaf.server.errors import ApiError, describe_invalid
from looseleaf.server.names import REFERENCE_NAME
from looseleaf.server.protocol.base import Strict
from looseleaf.server.protocol.chat import ChatRequest
from looseleaf.server.protocol.completion import CompletionRequest
from looseleaf.server.protocol.documents import RegisterRequest
from looseleaf.server.protocol.service import TokenizeRequest
from tests.server.live import Live, chat_body

MANY = 20_000
USER: dict[str, Any] = {"role": "user", "content": "x"}
NAMES = {f"a{n}": 1 for n in range(MANY)}


def prompt(value: Any) -> tuple[type[Strict], dict[str, Any]]:
    return CompletionRequest, {"model": "m", "prompt": value}


def chat(**fields: Any) -> tuple[type[Strict], dict[str, Any]]:
    return ChatRequest, {"model": "m", "messages": [USER], **fields}


LARGE = [
    ("a text behind tokens", *prompt([1] * MANY + ["a"]), f"prompt.{MANY}"),
    ("tokens behind texts", *prompt(["a"] * MANY + [1]), "prompt"),
    ("many prompts", *prompt([[1]] * MANY), "prompt"),
    ("numbers as documents", *chat(documents=[1] * MANY), "documents.0"),
    ("many documents", *chat(documents=[{"text": "x"}] * MANY), "documents"),
    ("numbers as messages", *chat(messages=[1] * MANY), "messages.0"),
    ("images", *chat(messages=[{**USER, "content": [{"type": "image"}] * MANY}]), None),
    ("numbers as stop strings", *chat(stop=[1] * MANY), "stop.0"),
    ("texts as stop tokens", *chat(stop_token_ids=["a"] * MANY), "stop_token_ids.0"),
    ("numbers as modalities", *chat(modalities=[1] * MANY), "modalities.0"),
    ("words as biases", *chat(logit_bias=NAMES), "logit_bias"),
    ("unknown fields", *chat(**NAMES), "a0"),
    ("unknown fields of a message", *chat(messages=[{**USER, **NAMES}]), "messages.0.a0"),
    (
        "texts as layers",
        *chat(fuse={"selector": "deviation", "check_layers": ["a"] * MANY}),
        "fuse.check_layers.0",
    ),
    ("a number in a collection", RegisterRequest, {"text": ["x"] * MANY + [1]}, f"text.{MANY}"),
]


@pytest.mark.parametrize(
    ("kind", "body", "param"), [case[1:] for case in LARGE], ids=[c[0] for c in LARGE]
)
def test_a_large_wrong_body_makes_few_errors(
    kind: type[Strict], body: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 6, "errors must not be as many as elements"
    errors = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
    if param is not None:
        assert describe_invalid(errors, body).param == param


def test_a_list_that_is_too_long_is_told_as_that() -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"model": "m", "prompt": [[1]] * 5000})
    errors = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
    assert "4096 or fewer items" in describe_invalid(errors, {"prompt": [[1]] * 5000}).detail


def test_a_repeated_name_is_found_in_one_pass() -> None:
    names = [f'"{n}":0' for n in range(60_000)]
    content = ("{" + ",".join([*names, names[-1]]) + "}").encode()
    start = time.process_time()
    with pytest.raises(ApiError, match="'59999' is repeated"):
        parse_json(content)
    # by counting each name it takes minutes
    assert time.process_time() - start < 5


def test_fields_that_are_null_ask_for_nothing(live: Live) -> None:
    names = (
        "reasoning_effort",
        "verbosity",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
    )
    body = chat_body(messages=[{**USER, "name": None}], max_tokens=1)
    answer = live.post("/v1/chat/completions", {**body, **dict.fromkeys(names)})
    assert answer.status_code == 200, answer.text
    for name in ("reasoning_effort", "verbosity"):
        refused = live.post("/v1/chat/completions", {**body, name: "loud"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize(
    ("path", "kind", "body"),
    [
        ("/v1/documents", RegisterRequest, {"text": "Null is no text."}),
        ("/tokenize", TokenizeRequest, {"prompt": "Null is no text."}),
        ("/v1/chat/completions", ChatRequest, chat_body(max_tokens=1)),
        ("/v1/completions", CompletionRequest, {"model": REFERENCE_NAME, "prompt": "Null"}),
    ],
)
def test_null_is_the_default_of_every_field_that_has_one(
    live: Live, path: str, kind: type[BaseModel], body: dict[str, Any]
) -> None:
    optional = {n for n, field in kind.model_fields.items() if not field.is_required()}
    answer = live.post(path, {**dict.fromkeys(optional - set(body)), **body})
    assert answer.status_code in (200, 201), answer.text


def test_a_text_that_must_be_there_is_not_null(live: Live) -> None:
    refused = live.post("/v1/documents", {"text": None})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "text")


def test_a_long_prompt_without_a_limit_gets_what_the_context_leaves(live: Live) -> None:
    context = live.service.llm.engine.max_model_len
    prompts = [[5] * (context - 3), [5, 6]]
    body = {"model": REFERENCE_NAME, "prompt": prompts, "temperature": 0, "ignore_eos": True}
    answer = live.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 3 + 16
    assert live.post("/v1/completions", {**body, "max_tokens": 16}).status_code == 400
    full = live.post("/v1/completions", {**body, "prompt": [5] * context})
    assert full.json()["error"]["code"] == "context_length_exceeded"

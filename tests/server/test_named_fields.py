"""A refusal names the field that is at fault, as the caller wrote it, and says it is not here."""

from typing import Any

import pytest
from pydantic import ValidationError

from looseleaf.server.errors import ApiError, describe_invalid
from looseleaf.server.protocol.chat import ChatRequest
from looseleaf.server.protocol.completion import CompletionRequest

USER = {"role": "user", "content": "Who signs?"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
SCHEMA = {"name": "answer", "schema": {"type": "boolean"}}


def refusal(body: dict[str, Any], kind: type[ChatRequest | CompletionRequest]) -> ApiError:
    # as the body has it, in front of which the framework puts a word of its own
    with pytest.raises(ValidationError) as raised:
        kind.model_validate(body)
    errors = [{**error, "loc": ("body", *error["loc"])} for error in raised.value.errors()]
    return describe_invalid(errors, body)


def chat_refusal(**fields: Any) -> ApiError:
    return refusal({"model": "m", "messages": [USER], **fields}, ChatRequest)


def said(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part]}]


def format_of(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        (
            "messages.0.content.0.cache_control",
            {"messages": said({"type": "text", "text": "Hi", "cache_control": {}})},
        ),
        (
            "messages.0.content.0.frobnicate",
            {"messages": said({"type": "document", "text": "Hi", "frobnicate": 1})},
        ),
        ("messages.0.content.0.text", {"messages": said({"type": "text"})}),
        ("messages.0.content.0.text", {"messages": said({"type": "text", "text": 7})}),
        (
            "response_format.frobnicate",
            {"response_format": format_of("json_schema", json_schema=SCHEMA, frobnicate=1)},
        ),
        (
            "response_format.json_schema.frobnicate",
            {"response_format": format_of("json_schema", json_schema={**SCHEMA, "frobnicate": 1})},
        ),
        ("response_format.json_schema", {"response_format": format_of("json_schema")}),
        (
            "messages.1.tool_calls",
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": None, "tool_calls": [CALL]},
                    {"role": "tool", "content": "3", "tool_call_id": "call_1"},
                ]
            },
        ),
    ],
)
def test_the_field_at_fault_is_named(param: str, fields: dict[str, Any]) -> None:
    refused = chat_refusal(**fields)
    assert refused.param == param
    assert param.rpartition(".")[2] in refused.detail


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"verbosity": "low"}, "verbosity asks for what is not here: leave it out, or send null"),
        ({"store": True}, "store: only false is taken here"),
        ({"tool_choice": "auto"}, "tool_choice: only 'none' is taken here"),
        (
            {"messages": said({"type": "image_url", "image_url": {"url": "x"}})},
            "messages.0.content.0: only the types 'text', 'document' are taken here",
        ),
        ({"messages": said({"text": "Hi"})}, "messages.0.content.0 has no field 'type': add it"),
    ],
)
def test_what_is_not_here_is_said_in_the_words_of_json(
    value: dict[str, Any], sentence: str
) -> None:
    assert chat_refusal(**value).detail == sentence


def test_completions_say_so_of_what_only_they_have() -> None:
    body = {"model": "m", "prompt": "x"}
    for field, asked, taken in (
        ("echo", True, "false"),
        ("best_of", 3, "1"),
        ("suffix", "x", "''"),
    ):
        refused = refusal({**body, field: asked}, CompletionRequest)
        assert (refused.param, refused.detail) == (field, f"{field}: only {taken} is taken here")


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_every_field_of_openais_own_client_is_known_here(
    kind: type[ChatRequest | CompletionRequest],
) -> None:
    """Where it asks for what is not here it is refused, and where it says null it is taken."""
    types = pytest.importorskip("openai.types")
    of_chat = types.chat.completion_create_params.CompletionCreateParamsBase
    of_completions = types.completion_create_params.CompletionCreateParamsBase
    given = of_chat if kind is ChatRequest else of_completions
    assert set(given.__annotations__) - set(kind.model_fields) == set()

"""A refusal names the field that is at fault, as the caller wrote it, and says it is not here."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from looseleaf.errors import InvalidOption
from looseleaf.server.errors import ApiError, as_api_error, describe_invalid
from looseleaf.server.policies import parse_policies
from looseleaf.server.protocol.base import IGNORED, Strict
from looseleaf.server.protocol.chat import ChatRequest
from looseleaf.server.protocol.completion import CompletionRequest
from looseleaf.server.protocol.documents import RegisterRequest
from looseleaf.server.protocol.policies import FuseInput
from looseleaf.server.protocol.service import TokenizeRequest
from looseleaf.server.sampling import chat_params

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
            "messages.1.tool_calls.0.frobnicate",
            {
                "messages": [
                    USER,
                    {"role": "assistant", "tool_calls": [{**CALL, "frobnicate": 1}]},
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
        ({"audio": {}}, "audio is not supported: leave it out, or send null"),
        ({"use_beam_search": True}, "use_beam_search must be false, not true"),
        ({"verbosity": "low"}, 'verbosity must be "medium", not "low"'),
        (
            {"messages": said({"type": "image_url", "image_url": {"url": "x"}})},
            'messages.0.content.0.type must be "text" or "document", not "image_url"',
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
    for field, value, values in (
        ("best_of", 3, "1, not 3"),
        ("suffix", "x", '"", not "x"'),
    ):
        refused = refusal({**body, field: value}, CompletionRequest)
        assert (refused.param, refused.detail) == (field, f"{field} must be {values}")


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_every_field_of_openais_own_client_is_known_here(
    kind: type[ChatRequest | CompletionRequest],
) -> None:
    """Where it asks for what is not here it is refused, and where it says null it is taken."""
    types = pytest.importorskip("openai.types")
    of_chat = types.chat.completion_create_params.CompletionCreateParamsBase
    of_completions = types.completion_create_params.CompletionCreateParamsBase
    parameters = of_chat if kind is ChatRequest else of_completions
    assert set(parameters.__annotations__) - set(kind.model_fields) == set()


FULL = {
    ChatRequest: {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "Hi"}, {"type": "document", "text": "x"}],
            },
        ],
        "documents": [{"id": "a", "title": "b", "text": "c", "context": "lead"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "response_format": {"type": "json_schema", "json_schema": SCHEMA},
        "logit_bias": {"5": 1.0},
        "stop": ["x"],
        "stop_token_ids": [3],
        "fuse": {"selector": "deviation", "ratio": 0.1, "check_layers": [1], "check_factors": [1]},
        "select": {"policy": "quest", "dense_layers": [0], "layer_budgets": [1.0]},
        "revise": {"window": 2, "adaptive": False, "local": "exact"},
    },
    CompletionRequest: {"model": "m", "prompt": [[1, 2], [3]]},
    RegisterRequest: {"id": "a", "text": ["x", "y"], "model": "m"},
    TokenizeRequest: {"model": "m", "prompt": "x"},
}
WRONG = [None, True, -7, 1.5, 2**80, "", "x\ny" * 99, [], ["x", 7], {}, {"x": 1}]
OWN_WORDS = {"missing", "extra_forbidden", "value_error", "none_required", "union_tag_not_found"}


def with_wrong(value: Any, wrong: Any) -> Iterator[Any]:
    """``value`` with ``wrong`` in each place, itself included."""
    yield wrong
    if not isinstance(value, dict | list):
        return
    for place, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        for changed in with_wrong(inner, wrong):
            copy = value.copy()
            copy[place] = changed
            yield copy


@pytest.mark.parametrize("kind", FULL, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: repr(wrong)[:12])
def test_every_field_says_what_it_should_be_and_what_it_is(kind: type[Strict], wrong: Any) -> None:
    body = {
        **dict.fromkeys(field.alias or n for n, field in kind.model_fields.items()),
        **FULL[kind],
    }
    sentences = 0
    for changed in with_wrong(body, wrong):
        try:
            kind.model_validate(changed)
        except ValidationError as raised:
            errors = [{**error, "loc": ("body", *error["loc"])} for error in raised.errors()]
            refused = describe_invalid(errors, changed)
            raw = {e["msg"].lower() for e in errors if e["type"] not in OWN_WORDS}
            assert not any(message in refused.detail.lower() for message in raw)
            assert len(refused.detail) <= 500
            if " must be " in refused.detail:
                assert ", not " in refused.detail
                assert (refused.param or "the body") in refused.detail
            sentences += 1
    assert sentences


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"documents": ["text"]}, 'documents.0 must be an object, not "text"'),
        ({"fuse": {"selector": "links", "ratio": 15}}, "fuse.ratio must be at most 1, not 15"),
        ({"stop": 7}, "stop must be a string or a list, not 7"),
        ({"messages": []}, "messages must be a list of 1 or more items, not a list of 0"),
        ({"n": 0}, "n must be at least 1, not 0"),
        ({"revise": 10}, "revise must be at most 9 or an object, not 10"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"
            " must be a list of 64 or fewer items, not a list of 65"),
    ],
    ids=str,
)  # fmt: skip
def test_a_refusal_is_a_sentence(fields: dict[str, Any], sentence: str) -> None:
    assert chat_refusal(**fields).detail == sentence


def test_options_of_the_library_have_the_names_of_bodies_and_flags() -> None:
    error = InvalidOption("lower max_tokens or raise max_model_len", "max_tokens", "max_model_len")
    detail = as_api_error(error, "id").detail
    assert detail == "lower max_tokens or raise the server's --max-model-len"
    request = ChatRequest(model="m", messages=[USER], max_completion_tokens=4, min_tokens=9)
    with pytest.raises(ApiError, match="min_tokens=9 is more than max_completion_tokens=4"):
        chat_params(request, 100, {})
    with pytest.raises(ApiError, match=r"give one of fuse\.ratio and fuse\.tokens"):
        parse_policies(
            request.model_copy(update={"fuse": FuseInput(selector="links", ratio=0.1, tokens=9)})
        )


def test_requests_of_guidellm_are_valid() -> None:
    # its stream options have a field that is not OpenAI's
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "m", "stream": True, "stream_options": options, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}
    token = IGNORED.set([])
    try:
        ChatRequest.model_validate(body | chat | {"max_completion_tokens": 4})
        CompletionRequest.model_validate(body | {"prompt": "Hi", "max_tokens": 4})
        assert IGNORED.get() == []
    finally:
        IGNORED.reset(token)

"""Anthropic's messages over HTTP: blocks, streams, tools, thoughts, documents and errors."""

import json
from typing import Any

import pytest

from looseleaf.server.messages.form import arguments_of
from tests.server.conftest import KEYS
from tests.server.live import DOCUMENT, Live
from tests.server.tooled import MODEL, WEATHER, named_events

PATH = "/v1/messages"
QUESTION = {"role": "user", "content": "Who signs travel requests?"}
TOOL = {"name": "get_weather", "description": "The weather.", "input_schema": WEATHER}


def body(**fields: Any) -> dict[str, Any]:
    """A small greedy request."""
    base = {"model": MODEL, "max_tokens": 12, "temperature": 0, "messages": [QUESTION]}
    return {**base, **fields}


def ask(live: Live, **fields: Any) -> Any:
    answer = live.post(PATH, body(**fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


def built(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client builds from a stream, as Anthropic's does."""
    message: dict[str, Any] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = {**event["message"]}
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append({**event["content_block"], "json": ""})
            case "content_block_delta":
                block, delta = message["content"][-1], event["delta"]
                assert event["index"] == len(message["content"]) - 1
                name = {"input_json_delta": "json"}.get(delta["type"])
                name = name or delta["type"].removesuffix("_delta")
                key = "partial_json" if name == "json" else name
                block[name] += delta[key]
            case "content_block_stop":
                block = message["content"][-1]
                text = block.pop("json")
                if block["type"] == "tool_use":
                    block["input"] = json.loads(text)
            case "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
    return message


def alike(message: dict[str, Any]) -> dict[str, Any]:
    """The parts of a message that another answer to the same request has, too."""
    content = [{**block, "id": None} for block in message["content"]]
    names = ("role", "model", "type", "stop_reason", "stop_sequence")
    tokens = message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]
    output_tokens = message["usage"]["output_tokens"]
    return {**{n: message[n] for n in names}, "content": content, "t": (tokens, output_tokens)}


CLOCK = {"name": "get_time", "input_schema": WEATHER}
FORCED = {
    "tools": [TOOL, CLOCK],
    "tool_choice": {"type": "tool", "name": "get_time"},
    "max_tokens": 80,
}
THINKING = {
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "chat_template_kwargs": {"thinking": True},
    "max_tokens": 3,
}


@pytest.mark.parametrize(
    ("fields", "kind", "reason"),
    [
        ({}, "text", "end_turn"),
        ({"max_tokens": 2}, "text", "max_tokens"),
        ({"stop_sequences": ["zzz", "do"]}, "text", "stop_sequence"),
        (FORCED, "tool_use", "tool_use"),
        (THINKING, "thinking", "max_tokens"),
    ],
    ids=["text", "limit", "stop", "call", "thoughts"],
)
def test_a_stream_builds_the_whole_message(
    tooled: Live, fields: dict[str, Any], kind: str, reason: str
) -> None:
    whole = ask(tooled, **fields)
    events = named_events(tooled, PATH, body(stream=True, **fields))
    assert [e["type"] for e in events[:2]] == ["message_start", "ping"]
    assert [e["type"] for e in events[-2:]] == ["message_delta", "message_stop"]
    assert alike(built(events)) == alike(whole)
    assert [block["type"] for block in whole["content"]] == [kind]
    assert whole["stop_reason"] == reason
    assert whole["stop_sequence"] == ("do" if reason == "stop_sequence" else None)
    if kind == "tool_use":
        assert whole["content"][0]["name"] == "get_time"
        assert whole["content"][0]["input"]["city"] in ("Oslo", "Rome")


def test_a_call_and_its_result_are_history(tooled: Live) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}}
    thought = {"type": "thinking", "thinking": "Oslo.", "signature": "x"}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Sunny."}
    turns = [
        QUESTION,
        {"role": "assistant", "content": [thought, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    system = [{"type": "text", "text": "Brief.", "cache_control": {"type": "ephemeral"}}]
    counted = tooled.post(
        f"{PATH}/count_tokens",
        {"model": MODEL, "messages": turns, "tools": [TOOL], "system": system},
    ).json()
    chat = [
        {"role": "system", "content": "Brief."},
        QUESTION,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "toolu_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "Sunny."},
        {"role": "user", "content": "So?"},
    ]
    function = {"name": "get_weather", "description": "The weather.", "parameters": WEATHER}
    tools = [{"type": "function", "function": function}]
    request = {"model": MODEL, "messages": chat, "tools": tools, "max_tokens": 0}
    usage = tooled.post("/v1/chat/completions", request).json()["usage"]
    assert counted == {"input_tokens": usage["prompt_tokens"]}
    answer = ask(tooled, messages=turns, tools=[TOOL], system=system, max_tokens=1)
    tokens = answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"]
    assert tokens == usage["prompt_tokens"]


def test_a_document_block_is_a_document(tooled: Live) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": DOCUMENT}
    result = {
        "type": "search_result",
        "source": "x",
        "title": "Found",
        "content": [{"type": "text", "text": "The seal of Mill House is anchor."}],
    }
    content = [{"type": "document", "source": source, "title": "Staff"}, result]
    content.append({"type": "text", "text": "Who signs travel requests?"})
    answer = ask(tooled, messages=[{"role": "user", "content": content}])
    documents = answer["looseleaf"]["documents"]
    assert [d["title"] for d in documents] == ["Staff", "Found"]
    again = ask(tooled, messages=[{"role": "user", "content": content}])
    assert {d["source"] for d in again["looseleaf"]["documents"]} == {"cached"}
    assert again["usage"]["cache_read_input_tokens"] >= sum(d["tokens"] for d in documents)


def test_a_last_message_of_the_assistant_is_continued(tooled: Live) -> None:
    whole = ask(tooled)["content"][0]["text"]
    first, rest = whole[:13], whole[13:]
    turns = [QUESTION, {"role": "assistant", "content": first}]
    assert ask(tooled, messages=turns)["content"][0]["text"] == rest


def test_messages_of_one_role_are_one_message(tooled: Live) -> None:
    def count(*contents: str) -> int:
        turns = [{"role": "user", "content": content} for content in contents]
        counted = tooled.post(f"{PATH}/count_tokens", {"model": MODEL, "messages": turns})
        number: int = counted.json()["input_tokens"]
        return number

    assert count("Who signs?", "Say it.") == count("Who signs?\n\nSay it.")


def test_a_failed_tool_is_named_as_such(tooled: Live) -> None:
    def count(**fields: Any) -> int:
        result = {"type": "tool_result", "tool_use_id": "1", **fields}
        turns = [QUESTION, {"role": "user", "content": [result]}]
        counted = tooled.post(f"{PATH}/count_tokens", {"model": MODEL, "messages": turns})
        number: int = counted.json()["input_tokens"]
        return number

    assert count(content="no", is_error=True) == count(content="Error: no")
    assert count(content=[{"type": "text", "text": "no"}]) == count(content="no")


@pytest.mark.parametrize(
    ("fields", "status", "kind", "param"),
    [
        ({"model": "other"}, 404, "not_found_error", "model"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", None),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "invalid_request_error",
            "messages.0.content.0",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result"}]}]},
            400,
            "invalid_request_error",
            "messages.0.content.0.tool_use_id",
        ),
    ],
)
def test_errors_have_the_form_of_the_api(
    tooled: Live, fields: dict[str, Any], status: int, kind: str, param: str | None
) -> None:
    refused = tooled.post(PATH, body(**fields))
    assert refused.status_code == status
    assert refused.headers["request-id"] == refused.headers["x-request-id"]
    answer = refused.json()
    assert answer["type"] == "error"
    assert (answer["error"]["type"], answer["error"]["param"]) == (kind, param)


def test_a_deadline_ends_with_an_error_of_the_api(tooled: Live) -> None:
    long_text = {"type": "object", "properties": {"x": {"type": "string", "minLength": 3000}}}
    endless = {**TOOL, "input_schema": {**long_text, "required": ["x"]}}
    forced = {"tools": [endless], "tool_choice": {"type": "any"}, "max_tokens": 3000}
    chat = body(stream=True, deadline=0.7, **forced)
    with tooled.client.stream("POST", PATH, json=chat) as response:
        last = response.read().decode().strip().split("\n")[-1]
    # a slow host reaches the deadline before the first token, and then the status says so
    assert response.status_code in (200, 408)
    error = json.loads(last.removeprefix("data: "))
    assert error["type"] == "error" and error["error"]["type"] == "timeout_error"


def test_an_api_key_header_is_a_key(tenants: Live) -> None:
    message = body(model="looseleaf-reference", max_tokens=1)
    assert tenants.post(PATH, message).json()["error"]["type"] == "authentication_error"
    for headers in ({"X-Api-Key": KEYS["red"]}, {"Authorization": f"Bearer {KEYS['red']}"}):
        assert tenants.post(PATH, message, headers=headers).status_code == 200
    assert tenants.post(PATH, message, headers={"X-Api-Key": "wrong-key-000"}).status_code == 401


def test_arguments_that_are_no_json_are_empty() -> None:
    assert arguments_of('{"x": 1e999}') == arguments_of("[1]") == arguments_of("no") == {}
    assert arguments_of('{"city": "Os') == {"city": "Os"}

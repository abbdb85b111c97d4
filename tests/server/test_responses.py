"""OpenAI's responses over HTTP: items, events, stored conversations and errors."""

import asyncio
import json
import threading
from typing import Any

import pytest

from looseleaf.errors import InvalidRequest, LimitExceeded
from tests.server.conftest import KEYS
from tests.server.live import DOCUMENT, Live, bearer, live_server
from tests.server.tooled import MODEL, WEATHER, named_events

PATH = "/v1/responses"
QUESTION = "Who signs travel requests?"
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather.",
    "parameters": WEATHER,
}
CLOCK = {**TOOL, "name": "get_time"}
FORCED = {
    "tools": [TOOL, CLOCK],
    "tool_choice": {"type": "function", "name": "get_time"},
    "max_output_tokens": 80,
}
THINKING = {"chat_template_kwargs": {"thinking": True}, "max_output_tokens": 3}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}


def body(**fields: Any) -> dict[str, Any]:
    """A small greedy request."""
    base = {"model": MODEL, "max_output_tokens": 12, "temperature": 0, "input": QUESTION}
    return {**base, **fields}


def ask(live: Live, **fields: Any) -> Any:
    answer = live.post(PATH, body(**fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(response: Any) -> str:
    (item,) = response["output"]
    (part,) = item["content"]
    text: str = part["text"]
    return text


def alike(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**item, "id": None, "call_id": None} for item in output]


DELTAS = {
    "response.output_text.delta": ("response.output_text.done", "text"),
    "response.reasoning_text.delta": ("response.reasoning_text.done", "text"),
    "response.function_call_arguments.delta": (
        "response.function_call_arguments.done",
        "arguments",
    ),
}


@pytest.mark.parametrize(
    ("fields", "kind", "status"),
    [
        ({}, "message", "completed"),
        ({"max_output_tokens": 2}, "message", "incomplete"),
        ({**LOGPROBS, "max_output_tokens": 3}, "message", "incomplete"),
        (FORCED, "function_call", "completed"),
        (THINKING, "reasoning", "incomplete"),
    ],
    ids=["text", "limit", "logprobs", "call", "thoughts"],
)
def test_a_stream_ends_with_the_whole_response(
    tooled: Live, fields: dict[str, Any], kind: str, status: str
) -> None:
    whole = ask(tooled, **fields)
    events = named_events(tooled, PATH, body(stream=True, **fields))
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{status}" and last["status"] == status
    assert alike(last["output"]) == alike(whole["output"])
    assert [item["type"] for item in whole["output"]] == [kind]
    assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    is_thought = kind == "reasoning"
    assert (whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0) == is_thought


@pytest.mark.parametrize("fields", [{}, FORCED, THINKING], ids=["text", "call", "thoughts"])
def test_events_are_in_order(tooled: Live, fields: dict[str, Any]) -> None:
    events = named_events(tooled, PATH, body(stream=True, **fields))
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    item_id = events[2]["item"]["id"]
    assert events[2]["item"]["status"] == "in_progress"
    (delta,) = {kind for kind in kinds if kind.endswith(".delta")}
    last_kind, name = DELTAS[delta]
    parts = [] if "call" in delta else ["response.content_part.added"]
    ends = [] if "call" in delta else ["response.content_part.done"]
    number = kinds.count(delta)
    assert kinds[3:-1] == [
        *parts,
        *[delta] * number,
        last_kind,
        *ends,
        "response.output_item.done",
    ]
    value = "".join(event["delta"] for event in events if event["type"] == delta)
    (end,) = [event for event in events if event["type"] == last_kind]
    assert end[name] == value
    (item,) = events[-1]["response"]["output"]
    ids = {event["item_id"] for event in events if "item_id" in event}
    assert ids == {item_id} == {item["id"]}
    assert json.dumps(value) in json.dumps(item)


def test_a_stored_response_is_continued_as_its_whole_conversation(tooled: Live) -> None:
    first = ask(tooled, instructions="Be brief.")
    second = ask(tooled, previous_response_id=first["id"], input="And then?")
    assert second["previous_response_id"] == first["id"] and second["instructions"] is None
    turns = [
        {"role": "user", "content": QUESTION},
        *first["output"],
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "And then?"}],
        },
    ]
    whole = ask(tooled, input=turns, store=False)
    assert text_of(whole) == text_of(second)
    assert whole["usage"]["input_tokens"] == second["usage"]["input_tokens"]
    referred = [turns[0], {"type": "item_reference", "id": first["output"][0]["id"]}, turns[2]]
    assert ask(tooled, input=referred)["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    third = ask(tooled, previous_response_id=second["id"], input="And?")
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]


def test_the_items_of_a_conversation_are_listed(tooled: Live) -> None:
    first = ask(tooled)
    second = ask(tooled, previous_response_id=first["id"], input="And then?")
    path = f"{PATH}/{second['id']}/input_items"
    items = tooled.client.get(path, params={"order": "asc"}).json()
    assert [item["role"] for item in items["data"]] == ["user", "assistant", "user"]
    assert items["data"][1]["id"] == first["output"][0]["id"] and not items["has_more"]
    backwards = tooled.client.get(path).json()["data"]
    assert backwards == items["data"][::-1]
    page = tooled.client.get(path, params={"limit": 1}).json()
    assert page["has_more"] and page["data"] == backwards[:1]
    rest = tooled.client.get(path, params={"after": page["last_id"]}).json()
    assert rest["data"] == backwards[1:]
    assert tooled.client.get(path, params={"after": "other"}).status_code == 404


def test_a_response_is_read_and_deleted(tooled: Live) -> None:
    response = ask(tooled, metadata={"a": "b"})
    path = f"{PATH}/{response['id']}"
    assert tooled.client.get(path).json() == response
    refused = tooled.client.post(f"{path}/cancel")
    assert refused.status_code == 400 and "background" in refused.json()["error"]["message"]
    assert tooled.client.delete(path).json()["deleted"] is True
    later = tooled.post(PATH, body(previous_response_id=response["id"]))
    gone = [tooled.client.get(path), tooled.client.delete(path), later]
    assert [answer.status_code for answer in gone] == [404] * 3
    assert {answer.json()["error"]["code"] for answer in gone} == {"response_not_found"}


def test_a_response_that_is_not_stored_is_not_found(tooled: Live) -> None:
    response = ask(tooled, store=False, max_output_tokens=1)
    assert response["store"] is False
    assert tooled.client.get(f"{PATH}/{response['id']}").status_code == 404


def test_a_streamed_response_is_stored(tooled: Live) -> None:
    *_, last = named_events(tooled, PATH, body(stream=True, max_output_tokens=1))
    assert tooled.client.get(f"{PATH}/{last['response']['id']}").json() == last["response"]


def test_calls_results_and_thoughts_are_history(tooled: Live) -> None:
    turns: list[dict[str, Any]] = [
        {"role": "developer", "content": "Brief."},
        {"role": "user", "content": QUESTION},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
        {"type": "function_call", "call_id": "1", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "get_time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "Sunny."},
        {
            "type": "function_call_output",
            "call_id": "2",
            "output": [{"type": "input_text", "text": "Noon."}],
        },
    ]
    counted = tooled.post(
        f"{PATH}/input_tokens", {"model": MODEL, "input": turns, "tools": [TOOL]}
    ).json()
    calls = [
        {"id": n, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for n, name in (("1", "get_weather"), ("2", "get_time"))
    ]
    chat = [
        {"role": "developer", "content": "Brief."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": None, "reasoning_content": "x", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "Sunny."},
        {"role": "tool", "tool_call_id": "2", "content": "Noon."},
    ]
    function = {name: value for name, value in TOOL.items() if name != "type"}
    tools = [{"type": "function", "function": function}]
    request = {"model": MODEL, "messages": chat, "tools": tools, "max_tokens": 0}
    usage = tooled.post("/v1/chat/completions", request).json()["usage"]
    assert counted == {"object": "response.input_tokens", "input_tokens": usage["prompt_tokens"]}


def test_a_text_follows_its_schema(tooled: Live) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    response = ask(tooled, text=text, max_output_tokens=60)
    assert json.loads(text_of(response)) == {"a": "b"}
    assert response["text"]["format"]["schema"] == schema


def test_allowed_tools_are_the_only_ones(tooled: Live) -> None:
    allowed = [{"type": "function", "name": "get_time"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    fields = {"tools": [TOOL, CLOCK], "tool_choice": choice, "parallel_tool_calls": False}
    response = ask(tooled, max_output_tokens=80, **fields)
    assert [item["name"] for item in response["output"]] == ["get_time"]
    assert response["tool_choice"] == choice


def test_documents_are_read_in_responses(tooled: Live) -> None:
    response = ask(tooled, documents=[{"text": DOCUMENT, "title": "Staff"}], max_output_tokens=1)
    assert response["looseleaf"]["documents"][0]["title"] == "Staff"
    inline = [{"type": "document", "text": DOCUMENT}, {"type": "input_text", "text": QUESTION}]
    again = ask(tooled, input=[{"role": "user", "content": inline}], max_output_tokens=1)
    assert len(again["looseleaf"]["documents"]) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, None),
        ({"input": [{"type": "computer_call"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"input": []}, "input"),
        ({"tool_choice": "required"}, None),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"conversation": "x"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_a_request_that_can_not_be_served_is_refused(
    tooled: Live, fields: dict[str, Any], param: str | None
) -> None:
    refused = tooled.post(PATH, body(**fields))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param, refused.text


def test_tenants_share_no_responses(tenants: Live) -> None:
    request = body(model="looseleaf-reference", max_output_tokens=1)
    response = tenants.post(PATH, request, headers=bearer(KEYS["red"])).json()
    path = f"{PATH}/{response['id']}"
    later = {**request, "previous_response_id": response["id"]}
    for method, url, content in (
        ("GET", path, None),
        ("GET", f"{path}/input_items", None),
        ("DELETE", path, None),
        ("POST", f"{path}/cancel", None),
        ("POST", PATH, later),
        ("POST", PATH, {**request, "input": [{"type": "item_reference", "id": "msg_1"}]}),
    ):
        blue = tenants.client.request(method, url, json=content, headers=bearer(KEYS["blue"]))
        assert blue.status_code == 404, (method, url)
    assert tenants.client.get(path, headers=bearer(KEYS["red"])).json() == response


def test_a_server_without_memory_for_responses_says_so() -> None:
    with live_server(config={"stored_responses_mib": 0}) as live:
        response = live.post(PATH, body(model="looseleaf-reference", max_output_tokens=1)).json()
        assert response["store"] is False
        assert live.client.get(f"{PATH}/{response['id']}").status_code == 404


def test_thoughts_are_counted_outside_of_the_event_loop(
    tooled: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tooled.service.llm.tokenizer
    threads: dict[str, int] = {}
    encode = tokenizer.encode

    def spy(text: str, special: bool = False) -> list[int]:
        threads[text] = threading.get_ident()
        return encode(text, special)

    async def own() -> int:
        return threading.get_ident()

    monkeypatch.setattr(tokenizer, "encode", spy)
    response = ask(tooled, **THINKING)
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    loop = asyncio.run_coroutine_threadsafe(own(), tooled.loop).result(30)
    assert threads[text_of(response)] != loop


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "error", [LimitExceeded("tokenizer", "too slow"), InvalidRequest("half a pair")]
)
def test_a_tokenizer_that_fails_after_the_answer_loses_no_response(
    tooled: Live, monkeypatch: pytest.MonkeyPatch, error: InvalidRequest, stream: bool
) -> None:
    expected = text_of(ask(tooled, **THINKING, store=False))
    tokenizer = tooled.service.llm.tokenizer
    encode = tokenizer.encode

    def fail(text: str, special: bool = False) -> list[int]:
        if text == expected:
            raise error
        return encode(text, special)

    monkeypatch.setattr(tokenizer, "encode", fail)
    if stream:
        response = named_events(tooled, PATH, body(stream=True, **THINKING))[-1]["response"]
    else:
        response = ask(tooled, **THINKING)
    assert text_of(response) == expected
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 0
    assert response["usage"]["output_tokens"] > 0
    assert tooled.client.get(f"{PATH}/{response['id']}").json() == response

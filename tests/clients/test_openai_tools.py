"""OpenAI's Python client: calls of tools, by the model's choice and by force."""

import json

import pytest

from tests.clients.expected import ANSWER, CLOCK, QUESTION, TOOLS, check_call

NAMED = {"type": "function", "function": {"name": "get_weather"}}


def chat(client, model, **fields):
    body = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 200, **fields}
    return client.chat.completions.create(**body)


def streamed_calls(chunks):
    """The names and arguments of streamed calls, and the reason of the end."""
    calls, reason = {}, None
    for chunk in chunks:
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            for delta in choice.delta.tool_calls or ():
                name, arguments = calls.get(delta.index, ("", ""))
                calls[delta.index] = (
                    name + (delta.function.name or ""),
                    arguments + (delta.function.arguments or ""),
                )
    return [calls[index] for index in sorted(calls)], reason


CHOICES = {"auto": "auto", "required": "required", "named": NAMED, "default": None}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_call_fits_its_schema(client, model, choice):
    fields = {} if CHOICES[choice] is None else {"tool_choice": CHOICES[choice]}
    answer = chat(client, model, tools=TOOLS, **fields).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert not answer.message.content
    (call, *_) = answer.message.tool_calls
    check_call(call.function.name, call.function.arguments)
    assert call.id and call.type == "function"


@pytest.mark.parametrize("choice", CHOICES)
def test_a_streamed_call_is_the_call_of_the_answer(client, model, choice):
    fields = {} if CHOICES[choice] is None else {"tool_choice": CHOICES[choice]}
    whole = chat(client, model, tools=TOOLS, **fields).choices[0].message.tool_calls
    calls, reason = streamed_calls(chat(client, model, tools=TOOLS, stream=True, **fields))
    assert reason == "tool_calls"
    assert calls == [(c.function.name, c.function.arguments) for c in whole]


def test_a_named_call_is_of_its_function(client, model):
    choice = {"type": "function", "function": {"name": "get_time"}}
    (call,) = chat(client, model, tools=TOOLS, tool_choice=choice).choices[0].message.tool_calls
    assert call.function.name == "get_time"


def test_tools_are_not_called_where_the_choice_is_none(client, model):
    message = chat(client, model, tools=TOOLS, tool_choice="none").choices[0].message
    assert message.content == ANSWER and not message.tool_calls


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_single_calls_are_single(client, model, choice):
    fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    assert len(chat(client, model, **fields).choices[0].message.tool_calls) == 1


@pytest.mark.parametrize("strict", [True, False])
def test_a_strict_function_is_called(client, model, strict):
    tools = [{"type": "function", "function": {**CLOCK, "strict": strict}}]
    (call,) = chat(client, model, tools=tools).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {}


def test_a_function_without_parameters_is_called(client, model):
    tools = [{"type": "function", "function": {"name": "ping"}}]
    (call, *_) = chat(client, model, tools=tools).choices[0].message.tool_calls
    assert call.function.name == "ping"
    assert isinstance(json.loads(call.function.arguments), dict)


def test_the_result_of_a_call_is_answered(client, model):
    message = chat(client, model, tools=TOOLS).choices[0].message
    history = [*QUESTION, message]
    history += [
        {"role": "tool", "tool_call_id": call.id, "content": "Rain."} for call in message.tool_calls
    ]
    answer = chat(client, model, messages=history, tools=TOOLS).choices[0]
    assert (answer.message.content, answer.finish_reason) == (ANSWER, "stop")


def test_a_history_of_calls_is_taken_as_dictionaries(client, model):
    call = {"id": "a1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    history = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a1", "content": [{"type": "text", "text": "Noon."}]},
    ]
    assert chat(client, model, messages=history).choices[0].message.content == ANSWER
    assert chat(client, model, messages=history, tools=TOOLS).choices[0].message.content == ANSWER


def test_the_helper_of_streams_collects_calls(client, model):
    with client.chat.completions.stream(
        model=model, messages=QUESTION, tools=TOOLS, tool_choice="required", max_tokens=200
    ) as stream:
        events = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    check_call(message.tool_calls[0].function.name, message.tool_calls[0].function.arguments)
    assert "tool_calls.function.arguments.delta" in events


def test_references_in_parameters_are_followed(client, model):
    parameters = {
        "type": "object",
        "properties": {"place": {"$ref": "#/$defs/place"}},
        "required": ["place"],
        "$defs": {"place": {"enum": ["Oslo", "Rome"]}},
    }
    tools = [{"type": "function", "function": {"name": "go", "parameters": parameters}}]
    for choice in ("auto", "required"):
        message = chat(client, model, tools=tools, tool_choice=choice).choices[0].message
        arguments = json.loads(message.tool_calls[0].function.arguments)
        assert arguments["place"] in ("Oslo", "Rome")

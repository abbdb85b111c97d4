"""Anthropic's Python client: messages, streams, tools, counts and errors."""

import asyncio

import anthropic
import pytest

from tests.clients.expected import ANSWER, QUESTION, WEATHER

TOOLS = [
    {
        "name": WEATHER["name"],
        "description": WEATHER["description"],
        "input_schema": WEATHER["parameters"],
    }
]

# the client has no argument for it
GREEDY = {"extra_body": {"temperature": 0}}


@pytest.fixture
def claude(server):
    url = server.url.rstrip("/")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(claude, model, **fields):
    body = {"model": model, "messages": QUESTION, "max_tokens": 200, **GREEDY, **fields}
    return claude.messages.create(**body)


def test_a_message_is_answered(claude, model):
    message = ask(claude, model)
    assert [block.text for block in message.content] == [ANSWER]
    assert message.stop_reason == "end_turn" and message.usage.output_tokens > 1


def test_a_system_text_precedes_the_message(claude, model):
    for system in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        assert ask(claude, model, system=system).content[0].text == ANSWER


def test_a_message_is_streamed(claude, model):
    options = {"model": model, "messages": QUESTION, "max_tokens": 200, **GREEDY}
    with claude.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == ANSWER
        assert stream.get_final_message().stop_reason == "end_turn"


def test_a_limit_is_the_reason_of_the_end(claude, model):
    assert ask(claude, model, max_tokens=2).stop_reason == "max_tokens"


def test_a_stop_sequence_is_the_reason_of_the_end(claude, model):
    message = ask(claude, model, stop_sequences=[" north"])
    assert message.stop_reason == "stop_sequence"
    assert message.content[0].text == "The archive is in the"


@pytest.mark.parametrize("choice", [None, {"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_tool_is_called_and_its_result_answered(claude, model, choice):
    fields = {"tools": TOOLS} if choice is None else {"tools": TOOLS, "tool_choice": choice}
    message = ask(claude, model, **fields)
    assert message.stop_reason == "tool_use"
    (use, *_) = [block for block in message.content if block.type == "tool_use"]
    assert use.name == "get_weather" and use.input["city"] in ("Oslo", "Rome")
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "Rain."}
        for block in message.content
        if block.type == "tool_use"
    ]
    history = [
        *QUESTION,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": results},
    ]
    assert ask(claude, model, messages=history, tools=TOOLS).content[0].type in ("text", "tool_use")


def test_streamed_calls_join(claude, model):
    options = {"model": model, "messages": QUESTION, "max_tokens": 200, "tools": TOOLS, **GREEDY}
    with claude.messages.stream(**options) as stream:
        message = stream.get_final_message()
    (use, *_) = [block for block in message.content if block.type == "tool_use"]
    assert set(use.input) == {"city", "days"}


def test_tokens_are_counted(claude, model):
    count = claude.messages.count_tokens(model=model, messages=QUESTION)
    assert count.input_tokens == ask(claude, model).usage.input_tokens > 0


def test_errors_have_their_classes(claude, model):
    with pytest.raises(anthropic.BadRequestError):
        ask(claude, model, extra_body={"temperature": 9})
    with pytest.raises(anthropic.NotFoundError):
        ask(claude, "absent")


def test_the_asynchronous_client_is_answered(server, model):
    async def run():
        url = server.url.rstrip("/")
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as client:
            return await ask(client, model)

    assert asyncio.run(run()).content[0].text == ANSWER

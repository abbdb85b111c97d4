"""Haystack's OpenAI generators: chats, streams, tools and an agent."""

from typing import Annotated, Literal

import pytest
from haystack import Pipeline
from haystack.components.agents import Agent
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret

from tests.clients.expected import ANSWER

QUESTION = [ChatMessage.from_user("Where is the archive?")]


def get_weather(
    city: Annotated[Literal["Oslo", "Rome"], "A city"], days: Annotated[int, "Days"]
) -> str:
    """The weather of a city."""
    return f"{city}: rain for {days} days."


@pytest.fixture
def generator(server, model):
    def make(**options):
        return OpenAIChatGenerator(
            model=model,
            api_base_url=server.api,
            api_key=Secret.from_token("none"),
            generation_kwargs={"temperature": 0, "max_tokens": 200},
            **options,
        )

    return make


def test_a_generator_answers(generator):
    (reply,) = generator().run(QUESTION)["replies"]
    assert reply.text == ANSWER and reply.meta["finish_reason"] == "stop"


def test_a_generator_streams(generator):
    pieces = []
    generator(streaming_callback=lambda chunk: pieces.append(chunk.content)).run(QUESTION)
    assert len(pieces) > 3 and "".join(pieces) == ANSWER


def test_a_pipeline_answers(generator):
    pipeline = Pipeline()
    pipeline.add_component("prompt", ChatPromptBuilder([ChatMessage.from_user("{{ question }}")]))
    pipeline.add_component("llm", generator())
    pipeline.connect("prompt.prompt", "llm.messages")
    result = pipeline.run({"prompt": {"question": "Where is the archive?"}})
    assert result["llm"]["replies"][0].text == ANSWER


def test_a_tool_is_called(generator):
    tool = create_tool_from_function(get_weather)
    (reply,) = generator(tools=[tool]).run(QUESTION)["replies"]
    (call, *_) = reply.tool_calls
    assert call.tool_name == "get_weather" and call.arguments["city"] in ("Oslo", "Rome")


def test_an_agent_calls_its_tool_and_answers(generator):
    tool = create_tool_from_function(get_weather)
    result = Agent(chat_generator=generator(), tools=[tool]).run(messages=QUESTION)
    assert result["messages"][-1].text == ANSWER

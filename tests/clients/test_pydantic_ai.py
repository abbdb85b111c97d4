"""pydantic-ai: answers, streams, tools, and typed output in each of its modes."""

import asyncio
from typing import Literal

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.expected import ANSWER, THOUGHT

QUESTION = "Where is the archive?"


class Forecast(BaseModel):
    """A forecast."""

    city: Literal["Oslo", "Rome"]
    days: int


@pytest.fixture
def served(server, model):
    return OpenAIChatModel(model, provider=OpenAIProvider(base_url=server.api, api_key="none"))


def test_an_agent_answers(served):
    result = Agent(served, instructions="Be brief.").run_sync(QUESTION)
    assert result.output == ANSWER
    assert result.usage.input_tokens > 0


def test_an_agent_streams_its_answer(served):
    async def run():
        async with Agent(served).run_stream(QUESTION) as result:
            return [text async for text in result.stream_text(debounce_by=None)]

    texts = asyncio.run(run())
    assert len(texts) > 3 and texts[-1] == ANSWER


def test_an_agent_calls_its_tool_and_answers(served):
    agent, cities = Agent(served, model_settings={"temperature": 0, "max_tokens": 200}), []

    @agent.tool_plain
    def get_weather(city: Literal["Oslo", "Rome"], days: int) -> str:
        """The weather of a city."""
        cities.append(city)
        return f"Rain for {days} days."

    result = agent.run_sync(QUESTION)
    assert result.output == ANSWER
    assert cities and {*cities} <= {"Oslo", "Rome"}
    assert agent.run_sync("And now?", message_history=result.all_messages()).output == ANSWER


@pytest.mark.parametrize("mode", [ToolOutput, NativeOutput])
def test_the_output_is_a_class(served, mode):
    settings = {"temperature": 0, "max_tokens": 200}
    agent = Agent(served, output_type=mode(Forecast), model_settings=settings)
    assert isinstance(agent.run_sync(QUESTION).output, Forecast)


def test_an_output_among_several_types_is_chosen(served):
    class Refusal(BaseModel):
        """No forecast."""

        reason: Literal["unknown"]

    settings = {"temperature": 0, "max_tokens": 200}
    agent = Agent(served, output_type=[Forecast, Refusal], model_settings=settings)
    assert isinstance(agent.run_sync(QUESTION).output, Forecast | Refusal)


def test_thoughts_are_parts_of_their_own(served):
    body = {"chat_template_kwargs": {"enable_thinking": True}}
    result = Agent(served, model_settings={"extra_body": body}).run_sync(QUESTION)
    parts = [part for message in result.all_messages() for part in message.parts]
    assert [part.content for part in parts if part.part_kind == "thinking"] == [THOUGHT]
    assert result.output == ANSWER

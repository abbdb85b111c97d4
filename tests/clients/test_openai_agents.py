"""openai-agents over chat completions: answers, streams, tools, handoffs and typed output."""

import asyncio
from typing import Literal

import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel

from tests.clients.expected import ANSWER

QUESTION = "Where is the archive?"
SETTINGS = ModelSettings(temperature=0, max_tokens=200)


class Forecast(BaseModel):
    """A forecast."""

    city: Literal["Oslo", "Rome"]
    days: int


@function_tool
def get_weather(city: Literal["Oslo", "Rome"], days: int) -> str:
    """The weather of a city."""
    return f"{city}: rain for {days} days."


@pytest.fixture
def agent(server, model):
    set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=server.api, api_key="none")
    served = OpenAIChatCompletionsModel(model=model, openai_client=client)

    def make(name="helper", **options):
        return Agent(name=name, model=served, model_settings=SETTINGS, **options)

    return make


def test_an_agent_answers(agent):
    result = asyncio.run(Runner.run(agent(instructions="Be brief."), QUESTION))
    assert result.final_output == ANSWER


def test_an_agent_calls_its_tool_and_answers(agent):
    result = asyncio.run(Runner.run(agent(tools=[get_weather]), QUESTION))
    kinds = [item.type for item in result.new_items]
    assert "tool_call_item" in kinds and "tool_call_output_item" in kinds
    assert result.final_output == ANSWER


def test_an_agent_streams_its_run(agent):
    async def run():
        result = Runner.run_streamed(agent(tools=[get_weather]), QUESTION)
        kinds = [event.type async for event in result.stream_events()]
        return kinds, result.final_output

    kinds, output = asyncio.run(run())
    assert output == ANSWER
    assert {"raw_response_event", "run_item_stream_event"} <= {*kinds}


def test_the_output_is_a_class(agent):
    result = asyncio.run(Runner.run(agent(output_type=Forecast), QUESTION))
    assert isinstance(result.final_output, Forecast)


def test_an_agent_hands_over(agent):
    other = agent("expert", handoff_description="Knows archives.")
    result = asyncio.run(Runner.run(agent(handoffs=[other]), QUESTION, max_turns=4))
    assert result.last_agent.name == "expert"
    assert result.final_output == ANSWER


def test_a_forced_tool_is_called(agent):
    weather_agent = agent(tools=[get_weather])
    weather_agent.model_settings = ModelSettings(
        tool_choice="required", max_tokens=200, temperature=0
    )
    result = asyncio.run(Runner.run(weather_agent, QUESTION))
    assert result.final_output == ANSWER

"""instructor: classes from answers, by tools and by schemas, whole, streamed and asynchronous."""

import asyncio
from typing import Literal

import instructor
import openai
import pytest
from pydantic import BaseModel

from tests.clients.expected import QUESTION


class City(BaseModel):
    """A city."""

    name: Literal["Oslo", "Rome"]


class Forecast(BaseModel):
    """A forecast of some cities."""

    city: City
    days: int
    rain: bool
    note: str | None


def patched(client, mode):
    return instructor.from_openai(client, mode=getattr(instructor.Mode, mode))


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_a_class_is_made_from_the_answer(client, model, mode):
    options = {"model": model, "messages": QUESTION, "max_tokens": 300, "temperature": 0}
    forecast = patched(client, mode).chat.completions.create(
        response_model=Forecast, max_retries=0, **options
    )
    assert isinstance(forecast, Forecast)


def test_the_raw_answer_comes_with_the_class(client, model):
    forecast, answer = patched(client, "TOOLS").chat.completions.create_with_completion(
        model=model, messages=QUESTION, response_model=Forecast, max_tokens=300
    )
    assert isinstance(forecast, Forecast)
    assert answer.usage.completion_tokens > 0


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_a_class_grows_in_a_stream(client, model, mode):
    parts = patched(client, mode).chat.completions.create_partial(
        model=model, messages=QUESTION, response_model=Forecast, max_tokens=300, temperature=0
    )
    *_, last = parts
    assert last.city.name in ("Oslo", "Rome")


def test_the_asynchronous_client_makes_the_class(server, model):
    async def run():
        async with openai.AsyncOpenAI(base_url=server.api, api_key="none") as client:
            instructor_client = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
            return await instructor_client.chat.completions.create(
                model=model, messages=QUESTION, response_model=Forecast, max_tokens=300
            )

    assert isinstance(asyncio.run(run()), Forecast)

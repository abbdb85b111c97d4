"""A pretrained model calls tools: by its choice and by force, whole and streamed, then answers.

Qwen2.5-Coder 1.5B from the folder LOOSELEAF_REAL; skipped without it. The model of 0.5 B calls the
tool and then repeats its call in place of an answer."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.real.conftest import files
from tests.server.live import Live, live_server

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "The name of a city."}},
                "required": ["city"],
            },
        },
    }
    for name, description in (
        ("get_weather", "The weather of a city today."),
        ("get_population", "The number of people who live in a city."),
    )
]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Oslo today?"}]
CODERS = [path for path in files() if "Coder-1.5B" in path.name]


@pytest.fixture(scope="module", params=CODERS, ids=lambda path: path.stem)
def server(request: pytest.FixtureRequest) -> Iterator[Live]:
    options = {"max_model_len": 2048}
    with live_server(request.param, config={"served_model_name": "coder"}, engine=options) as live:
        yield live


def ask(server: Live, **fields: Any) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        # forced calls may go on, and a small model lets them
        body = {"model": "coder", "messages": QUESTION, "temperature": 0, "max_tokens": 64}
        body["parallel_tool_calls"] = False
        answer = client.chat.completions.create(**{**body, "tools": TOOLS, **fields})
        return [*answer] if fields.get("stream") else answer.choices[0]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_tool_is_called_whole_and_streamed_and_its_result_is_read(
    server: Live, choice: str
) -> None:
    answer = ask(server, tool_choice=choice)
    assert answer.finish_reason == "tool_calls", answer.message.content
    call = answer.message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"].lower().startswith("oslo")

    chunks = ask(server, tool_choice=choice, stream=True)
    deltas = [d for c in chunks for d in c.choices[0].delta.tool_calls or () if d.index == 0]
    assert "".join(d.function.name or "" for d in deltas) == "get_weather"
    assert "".join(d.function.arguments or "" for d in deltas) == call.function.arguments

    result = {"role": "tool", "tool_call_id": call.id, "content": "Snow, minus 7 degrees."}
    message = answer.message.model_dump(exclude_none=True)
    message["tool_calls"] = message["tool_calls"][:1]
    # with tools in view a small model repeats its call
    final = ask(server, messages=[*QUESTION, message, result], tool_choice="none")
    assert "7" in (final.message.content or "")

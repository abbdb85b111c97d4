"""OpenAI's Python client: errors by their class, timeouts, and streams that a client leaves."""

import time

import httpx
import openai
import pytest

from tests.clients.expected import ANSWER, QUESTION, TOOLS


def chat(client, model, **fields):
    return client.chat.completions.create(**{"model": model, "messages": QUESTION, **fields})


JSON = {"Content-Type": "application/json"}
WRONG = {
    "temperature": {"temperature": 3},
    "negative temperature": {"temperature": -1},
    "top_p": {"top_p": 2},
    "n": {"n": 0},
    "no messages": {"messages": []},
    "role": {"messages": [{"role": "wizard", "content": "Hi"}]},
    "content": {"messages": [{"role": "user", "content": [{"type": "video", "video": "x"}]}]},
    "image": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}],
            }
        ]
    },
    "max_tokens": {"max_tokens": -1},
    "stop": {"stop": 5},
    "top_logprobs without logprobs": {"top_logprobs": 2},
    "top_logprobs": {"logprobs": True, "top_logprobs": 21},
    "logit_bias": {"logit_bias": {"999999": 1}},
    "stream_options": {"stream_options": {"include_usage": True}},
    "response_format": {"response_format": {"type": "xml"}},
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": "wobble"}},
        }
    },
    "tool_choice without tools": {"tool_choice": "required"},
    "tool_choice": {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "absent"}},
    },
    "tools": {"tools": [{"type": "function"}]},
    "deadline": {"extra_body": {"deadline": -1}},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_field_is_a_bad_request(client, model, name):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, model, **WRONG[name])
    assert caught.value.type == "invalid_request_error"
    assert len(caught.value.message) > 20


def test_an_error_names_its_parameter(client, model):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, model, temperature=3)
    assert caught.value.param == "temperature"


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        chat(client, "absent")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("absent")


def test_a_prompt_beyond_the_context_has_the_code_of_openai(client, model):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, model, messages=[{"role": "user", "content": "wind " * 20_000}])
    assert caught.value.code == "context_length_exceeded"


def test_embeddings_are_refused_in_one_sentence(client, model):
    with pytest.raises(openai.APIStatusError) as caught:
        client.embeddings.create(model=model, input="Hello")
    assert caught.value.status_code in (400, 404, 501)
    assert "embedding" in caught.value.message


def test_an_unknown_route_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        client.images.generate(prompt="a cat", model="x")


def test_a_wrong_body_is_a_bad_request(server):
    answer = httpx.post(f"{server.api}/chat/completions", content=b"{", headers=JSON, timeout=30)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_a_deadline_ends_the_request(client, model):
    with pytest.raises(openai.APIStatusError) as caught:
        chat(
            client,
            model,
            max_tokens=16_000,
            extra_body={"deadline": 0.05, "ignore_eos": True},
        )
    assert caught.value.status_code == 408


def test_a_client_that_times_out_leaves_the_server_well(server, client, model):
    with pytest.raises(openai.APITimeoutError):
        chat(
            client.with_options(timeout=0.2),
            model,
            max_tokens=16_000,
            extra_body={"ignore_eos": True},
        )
    assert chat(client, model, temperature=0).choices[0].message.content == ANSWER
    assert _ends(server)


def test_a_stream_that_is_left_is_ended(server, client, model):
    stream = chat(client, model, stream=True, max_tokens=16_000, extra_body={"ignore_eos": True})
    for number, _ in enumerate(stream):
        if number == 5:
            break
    stream.close()
    assert _ends(server)


def _ends(server):
    """Whether no request runs any more, within some seconds."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if server.metric("looseleaf_running_outputs") == 0:
            return True
    return False

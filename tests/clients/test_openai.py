"""OpenAI's Python client: chats, streams, sampling, formats and completions."""

import asyncio
import json
import math

import openai
import pytest
from pydantic import BaseModel

from tests.clients.expected import ANSWER, QUESTION, THOUGHT


def chat(client, model, **fields):
    body = {"model": model, "messages": QUESTION, "temperature": 0, **fields}
    return client.chat.completions.create(**body)


def text_of(chunks):
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def test_a_chat_has_the_answer_and_its_usage(client, model):
    answer = chat(client, model)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


def test_a_stream_has_the_chunks_of_the_answer(client, model):
    *chunks, last = chat(client, model, stream=True, stream_options={"include_usage": True})
    assert text_of(chunks) == ANSWER
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert last.choices == [] and last.usage.completion_tokens > 1


def test_usage_along_is_in_every_chunk(client, model):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = [*chat(client, model, stream=True, stream_options=options)]
    assert all(chunk.usage is not None for chunk in chunks)


def test_the_helper_of_streams_collects_the_answer(client, model):
    with client.chat.completions.stream(model=model, messages=QUESTION, temperature=0) as stream:
        events = [event.type for event in stream]
        assert stream.get_final_completion().choices[0].message.content == ANSWER
    assert "content.delta" in events and "content.done" in events


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_precede_the_question(client, model, role):
    messages = [{"role": role, "content": "Be brief."}, *QUESTION]
    assert chat(client, model, messages=messages).choices[0].message.content == ANSWER


def test_a_conversation_takes_its_own_answers_back(client, model):
    first = chat(client, model).choices[0].message
    messages = [*QUESTION, first.model_dump(), {"role": "user", "content": "Again?"}]
    assert chat(client, model, messages=messages).choices[0].message.content == ANSWER
    messages[1] = first
    assert chat(client, model, messages=messages).choices[0].message.content == ANSWER


def test_parts_of_a_message_are_joined(client, model):
    parts = [{"type": "text", "text": "Where is "}, {"type": "text", "text": "the archive?"}]
    whole = chat(client, model)
    split = chat(client, model, messages=[{"role": "user", "content": parts}])
    assert split.usage.prompt_tokens == whole.usage.prompt_tokens


NEUTRAL = {
    "user": "me",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "prompt_cache_key": "key",
    "safety_identifier": "me",
    "parallel_tool_calls": True,
    "logit_bias": {},
    "modalities": ["text"],
    "verbosity": "medium",
    "n": 1,
    "stop": None,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_p": 1,
    "seed": 7,
    "logprobs": False,
    "response_format": {"type": "text"},
    "reasoning_effort": "low",
    "tools": [],
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_field_without_effect_is_taken(client, model, name):
    assert chat(client, model, **{name: NEUTRAL[name]}).choices[0].message.content == ANSWER


EXTRA = {
    "top_k": 5,
    "min_p": 0.01,
    "repetition_penalty": 1.0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "add_generation_prompt": True,
    "priority": 0,
    "echo": False,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "min_tokens": 0,
    "stop_token_ids": [],
    "cache_salt": "salt",
    "request_id": "mine",
    "chat_template_kwargs": {},
    "include_reasoning": True,
}


@pytest.mark.parametrize("name", EXTRA)
def test_a_field_of_other_servers_is_taken(client, model, name):
    answer = chat(client, model, extra_body={name: EXTRA[name]})
    assert answer.choices[0].message.content == ANSWER


def test_an_unknown_field_is_ignored_with_a_header(client, model):
    answer = client.chat.completions.with_raw_response.create(
        model=model, messages=QUESTION, temperature=0, extra_body={"wobble": 1}
    )
    assert answer.parse().choices[0].message.content == ANSWER
    assert any("wobble" in value for value in answer.headers.values())


def test_the_request_id_of_the_caller_comes_back(client, model):
    answer = client.chat.completions.with_raw_response.create(
        model=model, messages=QUESTION, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert answer.headers["x-request-id"] == "mine-1"


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_a_limit_cuts_the_answer(client, model, limit):
    answer = chat(client, model, **{limit: 3})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 3
    assert ANSWER.startswith(answer.choices[0].message.content)


@pytest.mark.parametrize("stop", [" north", [" north", "zzz"]])
def test_a_stop_string_ends_the_answer_before_itself(client, model, stop):
    choice = chat(client, model, stop=stop).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("The archive is in the", "stop")
    assert text_of(chat(client, model, stop=stop, stream=True)) == "The archive is in the"


def test_a_seed_decides_the_draws(client, model):
    def drawn(seed):
        options = {"temperature": 2.0, "seed": seed, "max_tokens": 40}
        return chat(client, model, **options).choices[0].message.content

    assert drawn(1) == drawn(1)
    assert len({drawn(seed) for seed in range(8)}) > 1


def test_several_choices_are_numbered(client, model):
    plain = chat(client, model, n=3, temperature=1.5, seed=3, max_tokens=12)
    assert [choice.index for choice in plain.choices] == [0, 1, 2]
    texts = dict.fromkeys(range(3), "")
    for chunk in chat(client, model, n=3, temperature=1.5, seed=3, max_tokens=12, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {c.index: c.message.content for c in plain.choices}


def test_log_probabilities_spell_the_answer(client, model):
    choice = chat(client, model, logprobs=True, top_logprobs=4).choices[0]
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries).startswith(ANSWER)
    assert all(len(entry.top_logprobs) == 4 for entry in entries)
    assert all(math.isfinite(entry.logprob) and entry.logprob <= 0 for entry in entries)


def test_streamed_log_probabilities_are_those_of_the_answer(client, model):
    whole = chat(client, model, logprobs=True).choices[0].logprobs.content
    chunks = chat(client, model, logprobs=True, stream=True)
    pieces = [c.choices[0].logprobs for c in chunks if c.choices]
    entries = [entry for piece in pieces if piece for entry in piece.content]
    assert [e.token for e in entries] == [e.token for e in whole]
    assert [e.logprob for e in entries] == pytest.approx([e.logprob for e in whole], abs=1e-4)


def test_a_bias_forbids_a_token(client, model, server):
    (token,) = server.post("/tokenize", {"model": model, "prompt": " north"})["tokens"][-1:]
    answer = chat(client, model, logit_bias={str(token): -100}, max_tokens=8)
    assert "north" not in answer.choices[0].message.content


def test_thoughts_are_apart_from_the_answer(client, model):
    body = {"chat_template_kwargs": {"enable_thinking": True}}
    message = chat(client, model, extra_body=body).choices[0].message
    assert (message.content, message.reasoning_content) == (ANSWER, THOUGHT)
    chunks = [*chat(client, model, extra_body=body, stream=True)]
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == THOUGHT
    assert text_of(chunks) == ANSWER


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "rain": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
    },
    "required": ["city", "days", "rain", "tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_schema_shapes_the_answer(client, model, strict):
    named = {"name": "weather", "schema": SCHEMA, "strict": strict}
    answer = chat(client, model, response_format={"type": "json_schema", "json_schema": named})
    value = json.loads(answer.choices[0].message.content)
    assert value["city"] in ("Oslo", "Rome") and 1 <= value["days"] <= 9
    assert isinstance(value["rain"], bool) and len(value["tags"]) <= 2


def test_a_json_object_is_one(client, model):
    answer = chat(client, model, response_format={"type": "json_object"}, max_tokens=50)
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


def test_a_streamed_schema_shapes_the_answer(client, model):
    named = {"name": "weather", "schema": SCHEMA, "strict": True}
    form = {"type": "json_schema", "json_schema": named}
    assert set(json.loads(text_of(chat(client, model, response_format=form, stream=True)))) == {
        *SCHEMA["properties"]
    }


class Weather(BaseModel):
    """A forecast."""

    city: str
    days: int
    rain: bool | None


def test_a_class_is_parsed_from_the_answer(client, model):
    parsed = client.chat.completions.parse(
        model=model, messages=QUESTION, response_format=Weather, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, Weather)


def test_a_cut_class_is_an_error_of_length(client, model):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=model, messages=QUESTION, response_format=Weather, max_tokens=2
        )


GUIDES = {
    "guided_choice": (["red", "blue"], lambda text: text in ("red", "blue")),
    "guided_regex": (r"[0-9]{3}-[a-z]", lambda text: len(text) == 5 and text[3] == "-"),
    "guided_json": (SCHEMA, lambda text: set(json.loads(text)) == {*SCHEMA["properties"]}),
    "structured_outputs": ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
}


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_of_vllm_shapes_the_answer(client, model, name):
    value, fits = GUIDES[name]
    answer = chat(client, model, extra_body={name: value}, max_tokens=120)
    assert fits(answer.choices[0].message.content)


def test_the_last_message_is_continued(client, model):
    messages = [*QUESTION, {"role": "assistant", "content": "The archive is"}]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    answer = chat(client, model, messages=messages, extra_body=body)
    assert answer.choices[0].message.content == " in the north wing."


def test_no_tokens_compute_the_prompt_only(client, model):
    answer = chat(client, model, extra_body={"max_tokens": 0})
    assert answer.usage.prompt_tokens > 0
    assert not answer.choices[0].message.content


def test_token_ids_are_returned_on_request(client, model):
    choice = chat(client, model, extra_body={"return_token_ids": True}).choices[0]
    assert len(choice.token_ids) > 1 and len(choice.prompt_token_ids) > 1


def test_documents_are_reused(client, model):
    body = {"documents": [{"title": "notes", "text": "The archive is in the north wing. " * 8}]}
    chat(client, model, extra_body=body)
    answer = chat(client, model, extra_body=body)
    assert answer.choices[0].message.content == ANSWER
    assert answer.usage.prompt_tokens_details.cached_tokens > 20


def test_a_completion_continues_its_prompt(client, model):
    options = {"model": model, "temperature": 0, "max_tokens": 8}
    whole = client.completions.create(prompt="The", **options)
    assert whole.choices[0].text == ANSWER.removeprefix("The")
    chunks = client.completions.create(prompt="The", stream=True, **options)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text


def test_prompts_have_a_choice_each(client, model):
    options = {"model": model, "temperature": 0, "max_tokens": 1}
    answer = client.completions.create(prompt=["The", " north"], **options)
    assert [(c.index, c.text) for c in answer.choices] == [(0, " archive"), (1, " wing")]


def test_a_prompt_of_ids_is_the_prompt_of_its_text(client, model, server):
    ids = server.post("/tokenize", {"model": model, "prompt": "The"})["tokens"]
    options = {"model": model, "temperature": 0, "max_tokens": 8}
    assert client.completions.create(prompt=ids, **options).choices[0].text == ANSWER[3:]
    (pair,) = client.completions.create(prompt=[ids], **options).choices
    assert pair.text == ANSWER[3:]


def test_an_echo_has_the_log_probabilities_of_the_prompt(client, model):
    prompt = "The archive is"
    options = {"model": model, "max_tokens": 0, "logprobs": 1}
    answer = client.completions.create(prompt=prompt, echo=True, **options).choices[0]
    assert answer.text.endswith(prompt)
    assert answer.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in answer.logprobs.token_logprobs[1:])
    assert len(answer.logprobs.tokens) == len(answer.logprobs.text_offset)


def test_an_echo_precedes_the_text(client, model):
    options = {"model": model, "max_tokens": 8, "temperature": 0}
    answer = client.completions.create(prompt="The", echo=True, **options)
    assert answer.choices[0].text.endswith(ANSWER)


@pytest.mark.parametrize("name", ["suffix", "best_of"])
def test_an_empty_field_of_completions_is_taken(client, model, name):
    value = {"suffix": None, "best_of": 1}[name]
    answer = client.completions.create(model=model, prompt="The", max_tokens=1, **{name: value})
    assert answer.choices[0].text


def test_the_models_are_listed_and_found(client, model):
    (only,) = client.models.list().data
    assert only.id == model == client.models.retrieve(model).id
    assert only.object == "model"


def test_many_requests_at_once_have_their_own_answers(server, model):
    async def ask(client, number):
        options = {"model": model, "temperature": 0}
        messages = [{"role": "user", "content": f"Question {number}: where is the archive?"}]
        if number % 2:
            stream = await client.chat.completions.create(messages=messages, stream=True, **options)
            chunks = [chunk async for chunk in stream]
            return text_of(chunks)
        answer = await client.chat.completions.create(messages=messages, **options)
        return answer.choices[0].message.content

    async def run():
        async with openai.AsyncOpenAI(base_url=server.api, api_key="none") as client:
            return await asyncio.gather(*(ask(client, number) for number in range(64)))

    assert {*asyncio.run(run())} == {ANSWER}

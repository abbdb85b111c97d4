"""The official OpenAI client gets from the server what it gets from OpenAI's."""

import asyncio
import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from tests.server.clients.asking import ANSWERS, DOCUMENTS, with_documents
from tests.server.clients.conftest import async_client_of

QUESTION = "Who signs travel requests?"


def ask(client, question=QUESTION, documents=DOCUMENTS, **options):
    options = {"temperature": 0, **options}
    return client.chat.completions.create(**with_documents(client, question, documents), **options)


def streamed(client, **options):
    """The chunks of a streamed answer."""
    return list(ask(client, stream=True, stream_options={"include_usage": True}, **options))


def test_the_models_are_listed_and_found_by_their_id(client):
    served = client.models.list().data
    assert served
    assert client.models.retrieve(served[0].id) == served[0]


@pytest.mark.parametrize("question", list(ANSWERS))
def test_a_chat_answers_from_its_documents(client, question):
    answer = ask(client, question)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content.strip() == ANSWERS[question]
    assert answer.choices[0].finish_reason == "stop"


def test_a_stream_adds_up_to_the_plain_answer_and_ends_with_usage(client):
    plain = ask(client)
    *chunks, last = streamed(client)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == plain.choices[0].message.content
    assert len([chunk for chunk in chunks if chunk.choices[0].delta.content]) > 3
    assert {chunk.id for chunk in [*chunks, last]} == {last.id}
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.total_tokens == plain.usage.total_tokens
    assert [entry["title"] for entry in last.looseleaf["documents"]] == [
        document["title"] for document in DOCUMENTS
    ]


def test_a_stream_without_include_usage_has_a_choice_in_every_chunk(client):
    assert all(chunk.choices for chunk in ask(client, stream=True))


def test_the_streaming_helper_collects_the_same_completion(client):
    options = {**with_documents(client, QUESTION), "temperature": 0}
    with client.chat.completions.stream(**options) as stream:
        for _ in stream:
            pass
        collected = stream.get_final_completion()
    assert collected.choices[0].message.content == ask(client).choices[0].message.content


def test_a_completion_continues_its_prompt(client, model):
    answer = client.completions.create(model=model, prompt="The archive", max_tokens=4)
    assert answer.object == "text_completion"
    assert answer.choices[0].text
    assert answer.usage.completion_tokens <= 4


def test_a_prompt_of_token_ids_gives_what_its_text_gives(client, model, server):
    text = "Who signs travel requests?"
    token_ids = server.post("/tokenize", {"model": model, "prompt": text})["tokens"]
    options = {"model": model, "max_tokens": 8, "temperature": 0}
    from_ids, from_text = (
        client.completions.create(prompt=prompt, **options) for prompt in (token_ids, text)
    )
    assert from_ids.choices[0].text == from_text.choices[0].text


def test_a_list_of_prompts_gets_a_choice_each_in_order(client, model):
    prompts = ["The archive is", "The budget meeting is"]
    options = {"model": model, "max_tokens": 6, "temperature": 0}
    together = client.completions.create(prompt=prompts, **options)
    alone = [client.completions.create(prompt=prompt, **options) for prompt in prompts]
    assert [choice.index for choice in together.choices] == [0, 1]
    assert [c.text for c in together.choices] == [a.choices[0].text for a in alone]


def test_n_gives_as_many_choices_also_as_a_stream(client):
    plain = ask(client, n=3, temperature=1.0, seed=5)
    assert [choice.index for choice in plain.choices] == [0, 1, 2]
    texts = {0: "", 1: "", 2: ""}
    for chunk in streamed(client, n=3, temperature=1.0, seed=5):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {choice.index: choice.message.content for choice in plain.choices}


def test_a_stop_string_ends_the_answer_before_itself(client):
    whole = ask(client).choices[0].message.content
    word = whole.split()[3]
    cut = ask(client, stop=[word]).choices[0]
    assert cut.message.content == whole[: whole.index(word)]
    assert cut.finish_reason == "stop"


def test_a_limit_on_tokens_is_kept_and_told(client):
    for limit in ({"max_completion_tokens": 3}, {"max_tokens": 3}):
        answer = ask(client, **limit)
        assert answer.usage.completion_tokens == 3
        assert answer.choices[0].finish_reason == "length"


def test_logprobs_spell_the_answer_and_are_sorted(client):
    choice = ask(client, logprobs=True, top_logprobs=3).choices[0]
    entries = choice.logprobs.content
    spelt = b"".join(bytes(entry.bytes) for entry in entries).decode()
    assert spelt.startswith(choice.message.content)
    for entry in entries:
        tops = [top.logprob for top in entry.top_logprobs]
        assert len(tops) == 3
        assert tops == sorted(tops, reverse=True)
        assert entry.logprob == tops[0] <= 0


def test_a_seed_decides_what_is_drawn(client):
    def drawn(seed):
        options = {"temperature": 2.0, "seed": seed, "max_completion_tokens": 12}
        return ask(client, **options).choices[0].message.content

    assert drawn(1) == drawn(1)
    assert len({drawn(seed) for seed in range(4)}) > 1


class Signature(BaseModel):
    """Who signed."""

    by: Literal["Mira Tolland", "Emma Greston"]
    signed: bool
    page: Literal[1, 2] | None


def test_a_pydantic_class_shapes_the_answer(client):
    options = {**with_documents(client, QUESTION), "temperature": 0, "response_format": Signature}
    parsed = client.chat.completions.parse(**options)
    assert isinstance(parsed.choices[0].message.parsed, Signature)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(max_completion_tokens=2, **options)


def test_a_json_object_begins_as_one_and_is_one_when_it_ends(client, server):
    # a heavy hand on the closing brace: left alone, a model that never saw JSON writes on for ever
    (brace,) = server.post("/tokenize", {"prompt": "}"})["tokens"][-1:]
    for bias in ({}, {str(brace): 100}):
        options = {"response_format": {"type": "json_object"}, "logit_bias": bias}
        choice = ask(client, max_completion_tokens=24, **options).choices[0]
        assert choice.message.content.lstrip().startswith("{")
    assert choice.finish_reason == "stop"
    assert isinstance(json.loads(choice.message.content), dict)


def test_a_json_schema_of_fixed_size_is_always_filled(client):
    schema = {
        "type": "object",
        "properties": {"signed": {"type": "boolean"}, "by": {"enum": ["Mira", "Emma"]}},
        "required": ["signed", "by"],
        "additionalProperties": False,
    }
    named = {"name": "signature", "schema": schema, "strict": True}
    answer = ask(client, response_format={"type": "json_schema", "json_schema": named})
    read = json.loads(answer.choices[0].message.content)
    assert set(read) == {"signed", "by"}
    assert read["by"] in ("Mira", "Emma")
    assert isinstance(read["signed"], bool)


def test_usage_adds_up_and_tells_prefix_hits_from_reused_documents(client):
    documents = [{"title": "seal", "text": "The seal of Varn Mill is amber. It was made in Selby."}]
    first, second = (ask(client, documents=documents) for _ in range(2))
    for answer in (first, second):
        usage = answer.usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        report = answer.looseleaf
        uncomputed = report["text_tokens_cached"] + report["document_tokens_reused"]
        assert usage.prompt_tokens_details.cached_tokens == uncomputed
    (computed,) = first.looseleaf["documents"]
    (cached,) = second.looseleaf["documents"]
    assert (computed["source"], cached["source"]) == ("computed", "cached")
    assert second.looseleaf["document_tokens_reused"] == cached["tokens"] == computed["tokens"]
    assert second.looseleaf["document_tokens_computed"] == 0
    assert second.looseleaf["text_tokens_cached"] <= second.looseleaf["text_tokens"]


def test_many_answers_at_once_are_those_of_one_at_a_time(server, client):
    async def together():
        async with async_client_of(server) as asking:
            options = [with_documents(client, question) for question in ANSWERS]
            answers = [asking.chat.completions.create(temperature=0, **each) for each in options]
            return await asyncio.gather(*answers)

    answers = asyncio.run(together())
    assert [a.choices[0].message.content.strip() for a in answers] == list(ANSWERS.values())


def test_a_stream_that_is_left_is_over_and_the_server_goes_on(client):
    stream = ask(client, stream=True, max_completion_tokens=200)
    next(iter(stream))
    stream.close()
    assert ask(client).choices[0].message.content.strip() == ANSWERS[QUESTION]

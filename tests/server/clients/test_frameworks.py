"""The examples run as they are shown, and the frameworks' classes get right answers."""

import os
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

from tests.server.clients.asking import ANSWERS, DOCUMENTS

EXAMPLES = Path(__file__).parents[3] / "examples"
QUESTION = "Who signs travel requests?"


def langchain(server, **options):
    return ChatOpenAI(
        model=server.model,
        base_url=server.api,
        api_key="none",
        temperature=0,
        max_retries=0,
        **options,
    )


def llamaindex(server, **options):
    return OpenAILike(
        model=server.model,
        api_base=server.api,
        api_key="none",
        is_chat_model=True,
        temperature=0,
        max_retries=0,
        **options,
    )


def document_tokens(server):
    """Document tokens that the server computed, and that it did not have to."""
    computed, cached, awaited = (
        server.metric("looseleaf_document_tokens_total", source=source)
        for source in ("computed", "cached", "awaited")
    )
    return computed, cached + awaited


@pytest.mark.parametrize("name", ["serve_openai", "serve_langchain", "serve_llamaindex"])
def test_the_example_answers_and_its_second_order_computes_nothing(server, name):
    question_answers = {
        "serve_openai": "The home of Mira Tolland is in Quorin.",
        "serve_langchain": "The extension of Emma Greston is 385.",
        "serve_llamaindex": "The archive is in the north wing.",
    }
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py")]
    environment = os.environ | {"OPENAI_BASE_URL": server.api, "OPENAI_API_KEY": "none"}
    before = document_tokens(server)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.count(question_answers[name]) >= 2
    computed, reused = (
        now - then for now, then in zip(document_tokens(server), before, strict=True)
    )
    assert reused >= max(computed, 1)


@pytest.mark.parametrize("question", list(ANSWERS))
def test_langchain_gets_the_answer_whole_and_streamed(server, question):
    llm = langchain(server, stream_usage=True).bind(extra_body={"documents": DOCUMENTS})
    answer = llm.invoke(question)
    assert answer.content.strip() == ANSWERS[question]
    assert answer.response_metadata["finish_reason"] == "stop"
    chunks = list(llm.stream(question))
    assert "".join(chunk.content for chunk in chunks) == answer.content
    usage = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert usage[-1]["input_tokens"] == answer.usage_metadata["input_tokens"]


@pytest.mark.parametrize("question", list(ANSWERS))
def test_llamaindex_gets_the_answer_whole_and_streamed(server, question):
    llm, messages = llamaindex(server), [ChatMessage(role="user", content=question)]
    answer = llm.chat(messages, extra_body={"documents": DOCUMENTS})
    assert answer.message.content.strip() == ANSWERS[question]
    assert [d["title"] for d in answer.raw.looseleaf["documents"]] == [
        document["title"] for document in DOCUMENTS
    ]
    *_, last = llm.stream_chat(messages, extra_body={"documents": DOCUMENTS})
    assert last.message.content == answer.message.content


def test_the_documents_keep_their_content_whatever_framework_sends_them(server):
    langchain(server).bind(extra_body={"documents": DOCUMENTS}).invoke(QUESTION)
    before, _ = document_tokens(server)
    messages = [ChatMessage(role="user", content=QUESTION)]
    answer = llamaindex(server).chat(messages, extra_body={"documents": DOCUMENTS[::-1]})
    assert {entry["source"] for entry in answer.raw.looseleaf["documents"]} == {"cached"}
    assert document_tokens(server)[0] == before


def test_langchain_takes_sampling_options_and_logprobs(server):
    options = {"max_tokens": 4, "stop": ["zzz"], "seed": 3, "logprobs": True, "top_logprobs": 2}
    answer = langchain(server, **options).invoke(QUESTION)
    assert answer.response_metadata["finish_reason"] == "length"
    assert len(answer.response_metadata["logprobs"]["content"]) == 4


def test_langchain_gets_structured_output(server):
    schema = {
        "title": "signature",
        "type": "object",
        "properties": {"signed": {"type": "boolean"}},
        "required": ["signed"],
        "additionalProperties": False,
    }
    llm = langchain(server).with_structured_output(schema, method="json_schema", strict=True)
    assert set(llm.invoke(QUESTION)) == {"signed"}


def test_llamaindex_completes_text(server):
    llm = OpenAILike(
        model=server.model,
        api_base=server.api,
        api_key="none",
        is_chat_model=False,
        temperature=0,
        max_tokens=5,
        max_retries=0,
    )
    answer = llm.complete("The archive is")
    assert answer.text
    assert "".join(chunk.delta for chunk in llm.stream_complete("The archive is")) == answer.text


def test_a_refusal_reaches_the_frameworks_as_openais_exception(server):
    bound = langchain(server).bind(extra_body={"documents": [{"text": ""}]})
    with pytest.raises(openai.BadRequestError, match="empty"):
        bound.invoke(QUESTION)
    with pytest.raises(openai.BadRequestError, match="empty"):
        llamaindex(server).chat(
            [ChatMessage(role="user", content=QUESTION)],
            extra_body={"documents": [{"text": ""}]},
        )

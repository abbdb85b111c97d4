"""LangChain's ChatOpenAI: answers, streams, tools, structured output and `create_agent`."""

import asyncio
from typing import Literal

import openai
import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

from tests.clients.expected import ANSWER

QUESTION = "Where is the archive?"


class Forecast(BaseModel):
    """A forecast."""

    city: Literal["Oslo", "Rome"]
    days: int


@tool
def get_weather(city: Literal["Oslo", "Rome"], days: int) -> str:
    """The weather of a city."""
    return f"{city}: rain for {days} days."


@pytest.fixture
def llm(server, model):
    return made(server, model)


def made(server, model, **options):
    return ChatOpenAI(
        model=model,
        base_url=server.api,
        api_key="none",
        temperature=0,
        max_tokens=200,
        max_retries=0,
        **options,
    )


def test_a_question_is_answered(llm):
    answer = llm.invoke(QUESTION)
    assert answer.content == ANSWER
    assert answer.usage_metadata["output_tokens"] > 1


def test_messages_of_all_roles_are_taken(llm):
    messages = [
        SystemMessage("Be brief."),
        HumanMessage("Hi"),
        AIMessage("Hi."),
        ("user", "Where?"),
    ]
    assert llm.invoke(messages).content == ANSWER


def test_an_answer_is_streamed(server, model):
    chunks = [*made(server, model, stream_usage=True).stream(QUESTION)]
    assert "".join(chunk.content for chunk in chunks) == ANSWER
    assert any(chunk.usage_metadata for chunk in chunks)


def test_asynchronous_answers_are_the_same(llm):
    async def run():
        whole = await llm.ainvoke(QUESTION)
        return whole.content, "".join([chunk.content async for chunk in llm.astream(QUESTION)])

    assert asyncio.run(run()) == (ANSWER, ANSWER)


def test_a_batch_is_answered_in_order(llm):
    assert [a.content for a in llm.batch([QUESTION, "Where?"])] == [ANSWER, ANSWER]


def test_a_chain_of_prompt_model_and_parser_answers(llm):
    prompt = ChatPromptTemplate.from_messages([("system", "Be brief."), ("user", "{question}")])
    assert (prompt | llm | StrOutputParser()).invoke({"question": QUESTION}) == ANSWER


@pytest.mark.parametrize("choice", [None, "any", "auto", "get_weather"])
def test_bound_tools_are_called(llm, choice):
    answer = llm.bind_tools([get_weather], tool_choice=choice).invoke(QUESTION)
    (call, *_) = answer.tool_calls
    assert call["name"] == "get_weather" and call["args"]["city"] in ("Oslo", "Rome")


def test_streamed_calls_join(llm):
    chunks = [*llm.bind_tools([get_weather]).stream(QUESTION)]
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.tool_calls[0]["args"]["city"] in ("Oslo", "Rome")


def test_the_result_of_a_call_is_answered(llm):
    bound = llm.bind_tools([get_weather])
    call = bound.invoke(QUESTION)
    results = [ToolMessage("Rain.", tool_call_id=c["id"]) for c in call.tool_calls]
    assert bound.invoke([HumanMessage(QUESTION), call, *results]).content == ANSWER


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_a_class(llm, method):
    assert isinstance(
        llm.with_structured_output(Forecast, method=method).invoke(QUESTION), Forecast
    )


def test_structured_output_of_a_json_object_is_one(llm):
    value = llm.with_structured_output(None, method="json_mode").invoke(f"{QUESTION} As JSON.")
    assert isinstance(value, dict)


def test_structured_output_comes_with_its_message(llm):
    both = llm.with_structured_output(Forecast, include_raw=True).invoke(QUESTION)
    assert isinstance(both["parsed"], Forecast) and both["raw"].usage_metadata


def test_an_agent_calls_its_tool_and_answers(llm):
    agent = create_agent(llm, tools=[get_weather], system_prompt="Be brief.")
    messages = agent.invoke({"messages": [("user", QUESTION)]})["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    assert messages[-1].content == ANSWER


def test_an_agent_streams_its_steps(llm):
    agent = create_agent(llm, tools=[get_weather])
    inputs = {"messages": [("user", QUESTION)]}
    steps = [*agent.stream(inputs, stream_mode="updates")]
    assert len(steps) == 3
    tokens = [m.content for m, _ in agent.stream(inputs, stream_mode="messages") if m.content]
    assert ANSWER in "".join(tokens)


def test_an_agent_has_a_structured_response(llm):
    agent = create_agent(llm, tools=[], response_format=Forecast)
    result = agent.invoke({"messages": [("user", QUESTION)]})
    assert isinstance(result["structured_response"], Forecast)


def test_log_probabilities_are_metadata(server, model):
    answer = made(server, model, logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert len(answer.response_metadata["logprobs"]["content"]) > 1


def test_a_text_model_completes(server, model):
    llm = OpenAI(model=model, base_url=server.api, api_key="none", temperature=0, max_tokens=8)
    assert llm.invoke("The") == ANSWER.removeprefix("The")


def test_a_refusal_is_openais_exception(llm):
    with pytest.raises(openai.BadRequestError):
        llm.bind(temperature=9).invoke(QUESTION)

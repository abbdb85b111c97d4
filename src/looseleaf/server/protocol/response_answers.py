"""Answers of ``/v1/responses``."""

from typing import Annotated, Any, Literal

from pydantic import Field

from looseleaf.server.protocol.answers import LooseleafReport, TokenLogprobs
from looseleaf.server.protocol.base import Strict
from looseleaf.server.protocol.responses import Status


class OutputTextPart(Strict):
    """A run of text; ``logprobs`` as far as the request includes them."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[None] = Field(max_length=0)
    logprobs: list[TokenLogprobs]


class OutputMessage(Strict):
    """A text of the answer."""

    type: Literal["message"] = "message"
    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputTextPart]


class OutputCall(Strict):
    """A call that the client makes and answers with a `function_call_output`."""

    type: Literal["function_call"] = "function_call"
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


class ReasoningPart(Strict):
    """Thoughts."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputReasoning(Strict):
    """Thoughts of the model."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    status: Status
    summary: list[None] = Field(max_length=0)
    content: list[ReasoningPart]
    encrypted_content: None = None


class Incomplete(Strict):
    """The reason of an incomplete answer."""

    reason: Literal["max_output_tokens"]


class InputDetails(Strict):
    """Prompt tokens that were not computed; the `looseleaf` report has their kinds."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Strict):
    """Tokens of thoughts, by the tokenizer's count of their text."""

    reasoning_tokens: int


class ResponseUsage(Strict):
    """Tokens of the prompt and of the answer."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseBody(Strict):
    """A response. Fields of the request are repeated."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    incomplete_details: Incomplete | None
    error: None
    model: str
    output: list[
        Annotated[OutputMessage | OutputCall | OutputReasoning, Field(discriminator="type")]
    ]
    usage: ResponseUsage
    looseleaf: LooseleafReport
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str | None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class InputItems(Strict):
    """Items of a stored response's input, and of the conversation before it."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(Strict):
    """The answer to a deletion."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokens(Strict):
    """Tokens of the prompt."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int

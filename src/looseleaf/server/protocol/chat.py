"""Chat completion requests."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from looseleaf.server.protocol.base import FIRST_ONLY, Strict, Unsupported
from looseleaf.server.protocol.common import DocumentInput, GenerationRequest


class TextContent(Strict):
    """A run of text inside a message."""

    type: Literal["text"]
    text: str


class DocumentContent(DocumentInput):
    """A document at this position of the message."""

    type: Literal["document"]


ContentPart = Annotated[TextContent | DocumentContent, Field(discriminator="type")]


class ChatMessage(Strict):
    """A message of the conversation.

    OpenAI's answers contain the empty fields below, so clients can send an answer back unchanged.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[ContentPart], Field(min_length=1, max_length=4096), FIRST_ONLY]
    name: None = None
    refusal: None = None
    annotations: Unsupported = None
    audio: None = None
    function_call: None = None
    tool_calls: Unsupported = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=4096), FIRST_ONLY]


class ChatRequest(GenerationRequest):
    """``POST /v1/chat/completions``.

    Unsupported fields may have their empty value, which many clients always send."""

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Unsupported = None
    tool_choice: Literal["none"] | None = None
    parallel_tool_calls: bool | None = None
    functions: Unsupported = None
    function_call: Literal["none"] | None = None
    modalities: Annotated[list[Literal["text"]], FIRST_ONLY] | None = None
    audio: None = None
    prediction: None = None
    moderation: None = None
    web_search_options: None = None
    reasoning_effort: Literal["none"] | None = None
    verbosity: None = None
    prompt_cache_key: None = None
    prompt_cache_options: None = None
    prompt_cache_retention: None = None
    safety_identifier: None = None

    @model_validator(mode="after")
    def _agree(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError("max_tokens and max_completion_tokens differ: give one of them")
        return self

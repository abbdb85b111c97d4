"""Chat completion requests."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from looseleaf.server.protocol.base import FIRST_ONLY, Nothing, Strict
from looseleaf.server.protocol.common import DocumentInput, GenerationRequest


class TextContent(Strict):
    """A run of text inside a message."""

    type: Literal["text"]
    text: str


class DocumentContent(DocumentInput):
    """A document that stands exactly here in the message."""

    type: Literal["document"]


ContentPart = Annotated[TextContent | DocumentContent, Field(discriminator="type")]


class ChatMessage(Strict):
    """A turn of the conversation. The fields that must be null or empty are those of OpenAI's own
    answers, so that an answer can be sent back as it came, and a name, which some clients always
    send."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[ContentPart], Field(min_length=1, max_length=4096), FIRST_ONLY]
    name: None = None
    refusal: None = None
    annotations: Nothing = None
    audio: None = None
    function_call: None = None
    tool_calls: Nothing = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=4096), FIRST_ONLY]


class ChatRequest(GenerationRequest):
    """``POST /v1/chat/completions``. Fields for what is not here may say that they ask for nothing,
    as some clients do in every request."""

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Nothing = None
    tool_choice: Literal["none"] | None = None
    parallel_tool_calls: bool | None = None
    functions: Nothing = None
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

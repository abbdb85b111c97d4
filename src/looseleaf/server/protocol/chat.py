"""Chat completion requests."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from looseleaf.server.protocol.base import FIRST_ONLY, Lenient, Unsupported
from looseleaf.server.protocol.common import DocumentInput, GenerationRequest
from looseleaf.server.protocol.tools import NamedToolChoice, ToolCalls, ToolChoice, Tools


class TextContent(Lenient):
    """A run of text inside a message."""

    type: Literal["text"]
    text: str


class DocumentContent(DocumentInput):
    """A document at this position of the message."""

    type: Literal["document"]


ContentPart = Annotated[TextContent | DocumentContent, Field(discriminator="type")]


class ChatMessage(Lenient):
    """A message of the conversation.

    Answers of OpenAI and of this server can be sent back unchanged. `content` may be null in a
    message with tool calls. Templates decide whether they show the reasoning of earlier turns."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        str | Annotated[list[ContentPart], Field(min_length=1, max_length=4096), FIRST_ONLY] | None
    ) = None
    name: str | None = Field(None, max_length=256)
    tool_calls: ToolCalls | None = None
    tool_call_id: str | None = Field(None, max_length=256)
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="Another name of `reasoning_content`.")
    refusal: None = None
    annotations: Unsupported = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _agree(self) -> "ChatMessage":
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError(
                f"the message of role {self.role} has no content: only messages with tool_calls "
                "may leave it out"
            )
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} has no tool_calls")
        return self


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=4096), FIRST_ONLY]


class ChatRequest(GenerationRequest):
    """``POST /v1/chat/completions``.

    Unsupported fields may have their empty value, which many clients always send."""

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    logprobs: bool | None = None
    echo: Literal[False] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Tools | None = None
    tool_choice: ToolChoice | None = Field(
        None, description="`auto` is the default with `tools`, `none` without."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="`false` limits the answer to one call."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the chat template, such as `enable_thinking`."
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="A variable of the chat template; `none` sets `enable_thinking` to false."
    )
    include_reasoning: bool | None = Field(
        None, description="`false` leaves the reasoning out of the answer."
    )
    add_generation_prompt: bool | None = Field(
        None, description="`false` ends the prompt after the last message."
    )
    continue_final_message: bool | None = Field(
        None, description="`true` continues the last message, which is the assistant's."
    )
    add_special_tokens: Literal[False] | None = None
    chat_template: None = None
    functions: Unsupported = None
    function_call: Literal["none"] | None = None
    modalities: Annotated[list[Literal["text"]], FIRST_ONLY] | None = None
    audio: None = None
    prediction: None = None
    moderation: None = None
    web_search_options: None = None
    verbosity: Literal["medium"] | None = None
    prompt_cache_options: None = None

    @model_validator(mode="after")
    def _agree(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError("max_tokens and max_completion_tokens differ: give one of them")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError(
                "continue_final_message and add_generation_prompt exclude each other: drop one"
            )
        self._check_tool_choice()
        return self

    def _check_tool_choice(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("tools has two functions of one name: rename one")
        choice = self.tool_choice
        if choice == "required" and not names:
            raise ValueError("tool_choice needs tools: give some")
        if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
            raise ValueError(f"tool_choice names {choice.function.name!r}, which is not in tools")

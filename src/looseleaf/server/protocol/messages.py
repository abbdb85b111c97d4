"""Bodies of ``/v1/messages``: Anthropic's messages, with this server's documents and policies."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from looseleaf.server.protocol.answers import LooseleafReport
from looseleaf.server.protocol.base import FIRST_ONLY, Lenient, Strict, Unsupported
from looseleaf.server.protocol.common import EngineRequest
from looseleaf.server.protocol.tools import ToolName

_CacheControl = Annotated[
    dict[str, Any] | None, Field(description="No effect: every prefix is cached.")
]


class TextBlock(Lenient):
    """A run of text."""

    type: Literal["text"]
    text: str
    cache_control: _CacheControl = None
    citations: Unsupported = None


Texts = Annotated[list[TextBlock], Field(max_length=4096), FIRST_ONLY]


class PlainSource(Lenient):
    """The text of a document."""

    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str


class ContentSource(Lenient):
    """The text of a document, in pieces."""

    type: Literal["content"]
    content: str | Texts


class CitationsOff(Lenient):
    """Citations, which this server does not make."""

    enabled: Literal[False] | None = None


class DocumentBlock(Lenient):
    """A document at this position: its keys and values are computed once."""

    type: Literal["document"]
    source: Annotated[PlainSource | ContentSource, Field(discriminator="type")]
    title: str | None = Field(None, max_length=1024)
    context: None = None
    citations: CitationsOff | None = None
    cache_control: _CacheControl = None


class SearchResultBlock(Lenient):
    """A document that a search returned."""

    type: Literal["search_result"]
    source: str
    title: str = Field(max_length=1024)
    content: Texts
    citations: CitationsOff | None = None
    cache_control: _CacheControl = None


class ThinkingBlock(Lenient):
    """Thoughts of an earlier answer. Templates decide whether they show them."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, description="No effect.")


class RedactedThinkingBlock(Lenient):
    """Thoughts that only another server can read; they are left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Lenient):
    """A call that the model has made."""

    type: Literal["tool_use"]
    id: str = Field(max_length=256)
    name: str = Field(max_length=256)
    input: dict[str, Any]
    cache_control: _CacheControl = None


ResultBlock = Annotated[TextBlock | DocumentBlock | SearchResultBlock, Field(discriminator="type")]


class ToolResultBlock(Lenient):
    """The result of a call. Results of failed calls begin with `Error:`."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=256)
    content: str | Annotated[list[ResultBlock], Field(max_length=4096), FIRST_ONLY] | None = None
    is_error: bool | None = None
    cache_control: _CacheControl = None


InputBlock = Annotated[
    TextBlock
    | DocumentBlock
    | SearchResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock,
    Field(discriminator="type"),
]
InputBlocks = Annotated[list[InputBlock], Field(max_length=4096), FIRST_ONLY]

_ROLES: dict[str, tuple[str, ...]] = {
    "user": ("text", "document", "search_result", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


class InputMessage(Lenient):
    """A message of the conversation. A last message of the assistant is continued."""

    role: Literal["user", "assistant", "system"]
    content: str | InputBlocks

    @model_validator(mode="after")
    def _agree(self) -> "InputMessage":
        if isinstance(self.content, str):
            return self
        allowed = _ROLES[self.role]
        wrong = next((block.type for block in self.content if block.type not in allowed), None)
        if wrong is not None:
            raise ValueError(f"a message of role {self.role} has no block of type {wrong}")
        return self


class ClientTool(Lenient):
    """A tool that the client runs: its name, a description, and the JSON schema of its input."""

    type: Literal["custom"] | None = Field(None, description="Other tools are Anthropic's own.")
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = Field(
        None, description="Forced calls follow the schema, with this field and without it."
    )
    cache_control: _CacheControl = None


class AutoChoice(Lenient):
    """The model decides whether it calls a tool."""

    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None


class AnyChoice(Lenient):
    """The answer must call a tool."""

    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class NamedChoice(Lenient):
    """The answer must call this tool."""

    type: Literal["tool"]
    name: ToolName
    disable_parallel_tool_use: bool | None = None


class NoChoice(Lenient):
    """The answer calls no tool."""

    type: Literal["none"]


Choice = Annotated[AutoChoice | AnyChoice | NamedChoice | NoChoice, Field(discriminator="type")]


class Thinking(Lenient):
    """Whether the model thinks before it answers; without this field it does not."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(
        None, ge=1, le=2**31, description="No effect: `max_tokens` bounds thoughts, too."
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="`omitted` leaves thoughts out of the answer. They are never summarized."
    )


class JsonOutput(Lenient):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Lenient):
    """The form of the text, and the effort of thoughts, a variable of the chat template."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutput | None = None


class CountTokensRequest(EngineRequest):
    """``POST /v1/messages/count_tokens``."""

    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=4096), FIRST_ONLY]
    system: str | Texts | None = None
    tools: Annotated[list[ClientTool], Field(max_length=1024), FIRST_ONLY] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the chat template."
    )
    cache_control: _CacheControl = None
    container: Unsupported = None
    mcp_servers: Unsupported = None
    context_management: Unsupported = None
    diagnostics: Unsupported = None
    inference_geo: str | None = Field(None, max_length=64, description="No effect.")
    speed: Literal["standard"] | None = None


class MessagesRequest(CountTokensRequest):
    """``POST /v1/messages``."""

    max_tokens: int = Field(
        ge=0, le=2**31, description="Lowered to the room that the context leaves."
    )
    stop_sequences: Annotated[list[str], Field(max_length=16), FIRST_ONLY] | None = None


class TokenCount(Strict):
    """Tokens of the prompt."""

    input_tokens: int


class TextAnswer(Strict):
    """A run of text."""

    type: Literal["text"] = "text"
    text: str
    citations: None = None


class ThinkingAnswer(Strict):
    """The model's thoughts. The signature has no meaning."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class ToolUseAnswer(Strict):
    """A call that the client makes and answers with a `tool_result`."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any] = Field(
        description="Of an answer that ended with `max_tokens`, the part that was written."
    )


class MessageUsage(Strict):
    """Tokens of the prompt that were computed, or not, and tokens of the answer."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageBody(Strict):
    """The answer to a conversation."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[
        Annotated[TextAnswer | ThinkingAnswer | ToolUseAnswer, Field(discriminator="type")]
    ]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage
    looseleaf: LooseleafReport


class MessageErrorDetail(Strict):
    """The error, and the field of the request at fault."""

    type: str
    message: str
    param: str | None
    code: str | None


class MessageError(Strict):
    """Every error below `/v1/messages` has this shape."""

    type: Literal["error"] = "error"
    error: MessageErrorDetail

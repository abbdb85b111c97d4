"""Requests of ``/v1/responses``: OpenAI's items, with this server's documents and policies."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from looseleaf.server.protocol.base import FIRST_ONLY, Lenient, Unsupported
from looseleaf.server.protocol.chat import DocumentContent
from looseleaf.server.protocol.common import EngineRequest, JsonObjectFormat, TextFormat
from looseleaf.server.protocol.tools import ToolName

Status = Literal["in_progress", "completed", "incomplete"]
ItemId = Annotated[str, Field(max_length=256)]


class InputText(Lenient):
    """A run of text."""

    type: Literal["input_text", "text"]
    text: str


class OutputText(Lenient):
    """A run of text of an earlier answer."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = Field(None, description="No effect.")


class Refusal(Lenient):
    """A refusal of an earlier answer, which is read as text."""

    type: Literal["refusal"]
    refusal: str


Part = Annotated[InputText | OutputText | Refusal | DocumentContent, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(max_length=4096), FIRST_ONLY]


class MessageItem(Lenient):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts
    id: ItemId | None = None
    status: Status | None = None
    phase: str | None = Field(None, max_length=64, description="No effect.")


class CallItem(Lenient):
    """A call that the model has made."""

    type: Literal["function_call"]
    call_id: ItemId
    name: str = Field(max_length=256)
    arguments: str
    id: ItemId | None = None
    status: Status | None = None


class CallOutputItem(Lenient):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: ItemId
    output: str | Parts
    id: ItemId | None = None
    status: Status | None = None


class SummaryText(Lenient):
    """A summary of thoughts, read where the thoughts themselves are absent."""

    type: Literal["summary_text"]
    text: str


class ReasoningText(Lenient):
    """Thoughts."""

    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(Lenient):
    """Thoughts of an earlier answer. Templates decide whether they show them."""

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryText], Field(max_length=4096), FIRST_ONLY] = Field(
        default_factory=list
    )
    content: Annotated[list[ReasoningText], Field(max_length=4096), FIRST_ONLY] | None = None
    encrypted_content: str | None = Field(None, description="No effect: it can't be read here.")
    id: ItemId | None = None
    status: Status | None = None


class ItemReference(Lenient):
    """An item of the output of a stored response."""

    type: Literal["item_reference"]
    id: ItemId


def _with_type(item: Any) -> Any:
    is_message = isinstance(item, dict) and "type" not in item
    return {"type": "message", **item} if is_message else item


InputItem = Annotated[
    MessageItem | CallItem | CallOutputItem | ReasoningItem | ItemReference,
    Field(discriminator="type"),
    BeforeValidator(_with_type),
]


class FunctionTool(Lenient):
    """A function: its name, a description, and the JSON schema of its arguments."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(
        None, description="Forced calls follow the schema, with this field and without it."
    )


class FunctionChoice(Lenient):
    """The function that the answer must call."""

    type: Literal["function"]
    name: ToolName


class AllowedTools(Lenient):
    """The functions that the answer may call, or must call one of."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1, max_length=1024), FIRST_ONLY]


ResponseToolChoice = (
    Literal["auto", "none", "required"]
    | Annotated[FunctionChoice | AllowedTools, Field(discriminator="type")]
)


class SchemaFormat(Lenient):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(Lenient):
    """The form of the text."""

    format: (
        Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None
    ) = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Lenient):
    """The effort of thoughts, a variable of the chat template. They are never summarized."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="No effect.")
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="No effect."
    )


class ResponseStreamOptions(Lenient):
    """Options of a stream."""

    include_obfuscation: bool | None = Field(None, description="No effect.")


Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ResponsesRequest(EngineRequest):
    """``POST /v1/responses``."""

    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=4096), FIRST_ONLY]
    instructions: str | None = Field(
        None, description="The system text; earlier instructions do not apply."
    )
    previous_response_id: str | None = Field(
        None, max_length=256, description="The stored response that this one continues."
    )
    store: bool | None = Field(
        None,
        description="`false` does not keep the response for later requests. Memory is limited, so "
        "old responses are dropped.",
    )
    include: Annotated[list[Included], Field(max_length=64), FIRST_ONLY] | None = Field(
        None, description="Only `message.output_text.logprobs` has an effect."
    )
    max_output_tokens: int | None = Field(None, ge=1, le=2**31)
    max_tool_calls: int | None = Field(
        None, ge=1, le=2**31, description="No effect: it counts calls of built-in tools."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="`false` limits the answer to one call."
    )
    tools: Annotated[list[FunctionTool], Field(max_length=1024), FIRST_ONLY] | None = None
    tool_choice: ResponseToolChoice | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    truncation: Literal["disabled"] | None = Field(
        None, description="Items are never dropped: a conversation above the context is refused."
    )
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the chat template."
    )
    include_reasoning: bool | None = Field(
        None, description="`false` leaves the reasoning out of the answer."
    )
    background: bool | None = Field(None, description="Only `false`.")
    conversation: Unsupported = None
    prompt: Unsupported = None
    context_management: Unsupported = None
    moderation: Unsupported = None
    prompt_cache_options: dict[str, Any] | None = Field(None, description="No effect.")

    @model_validator(mode="after")
    def _agree(self) -> "ResponsesRequest":
        if self.background:
            raise ValueError(
                "background responses are not supported: leave background out, and read the answer "
                "as a stream"
            )
        return self

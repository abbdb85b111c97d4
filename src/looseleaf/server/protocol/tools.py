"""Tools in requests: definitions, the choice among them, and the calls of earlier turns."""

from typing import Annotated, Any, Literal

from pydantic import Field

from looseleaf.server.protocol.base import FIRST_ONLY, Lenient

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class FunctionDefinition(Lenient):
    """A function: its name, a description, and the JSON schema of its arguments."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(
        None, description="Forced calls follow the schema, with this field and without it."
    )


class Tool(Lenient):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Lenient):
    """The name of a function."""

    name: ToolName


class NamedToolChoice(Lenient):
    """The function that the answer must call."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["auto", "none", "required"] | NamedToolChoice
Tools = Annotated[list[Tool], Field(max_length=1024), FIRST_ONLY]


class FunctionCall(Lenient):
    """A function's name, and the JSON text of its arguments."""

    name: str = Field(max_length=256)
    arguments: str


class ToolCall(Lenient):
    """A call that the model has made."""

    id: str | None = Field(None, max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall


ToolCalls = Annotated[list[ToolCall], Field(max_length=1024), FIRST_ONLY]

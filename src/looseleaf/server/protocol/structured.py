"""Constraints of an answer's text, in the names of other servers."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from looseleaf.server.protocol.base import FIRST_ONLY, Lenient

Choices = Annotated[list[str], Field(min_length=1, max_length=4096), FIRST_ONLY]
Schema = dict[str, Any] | str


class StructuredOutputs(Lenient):
    """One constraint of the text."""

    json_: Schema | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = Field(None, description="A regular expression.")
    choice: Choices | None = Field(None, description="One of these texts.")
    grammar: str | None = Field(None, description="A grammar in Lark's notation.")
    json_object: bool | None = Field(None, description="Any JSON object.")

    @model_validator(mode="after")
    def _one(self) -> "StructuredOutputs":
        if self.number != 1:
            raise ValueError(
                "structured_outputs takes one of json, regex, choice, grammar and json_object"
            )
        return self

    @property
    def number(self) -> int:
        """The number of constraints."""
        texts = (self.json_, self.regex, self.choice, self.grammar, self.json_object or None)
        return sum(value is not None for value in texts)

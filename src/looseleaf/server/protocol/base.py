"""What all bodies have in common."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

FIRST_ONLY = Field(fail_fast=True)
"""For every list in a body: its first wrong element is told, and no error is made of the others. A
body may hold a million of them, and an error takes a kilobyte."""


def _nothing(given: Any, info: Any) -> None:
    if given not in (None, [], {}):
        raise ValueError(
            f"{info.field_name} asks for what is not here: leave it out, or send it empty"
        )


Nothing = Annotated[None, BeforeValidator(_nothing)]
"""A field for what is not here: null, or an empty list or object, which asks for nothing, too."""


class Strict(BaseModel):
    """A body whose fields are all known and of the right type; numbers are finite."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, given: Any) -> Any:
        """One unknown field is enough to refuse a body, whose unknown fields may be many."""
        if not isinstance(given, dict) or len(given) <= len(cls.model_fields):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next(name for name in given if name not in known)
        return {name: value for name, value in given.items() if name in known or name == unknown}


class Defaulting(Strict):
    """A body in which null says what leaving the field out says."""

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {n: value for n, value in given.items() if value is not None or n not in optional}

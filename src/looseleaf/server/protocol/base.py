"""Base classes of all bodies."""

from contextvars import ContextVar
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

FIRST_ONLY = Field(fail_fast=True)
"""For every list in a body: report the first wrong element only.

A body may contain a million wrong elements, and pydantic's error of one takes a kilobyte."""


def _require_empty(value: Any, info: Any) -> None:
    if value not in (None, [], {}):
        raise ValueError(f"{info.field_name} is not supported: leave it out, or send it empty")


Unsupported = Annotated[None, BeforeValidator(_require_empty)]
"""An unsupported field of OpenAI's: null, an empty list or an empty object."""


IGNORED: ContextVar[list[str] | None] = ContextVar("ignored fields", default=None)
"""The unknown fields of the request that is being read; None if they are errors."""


class Strict(BaseModel):
    """A body with known fields, strict types and finite numbers only."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _keep_first_unknown(cls, body: Any) -> Any:
        """Drop all unknown fields but the first, which bounds the number of errors."""
        if not isinstance(body, dict) or len(body) <= len(cls.model_fields):
            return body
        known = cls._known()
        unknown = next(name for name in body if name not in known)
        return {name: value for name, value in body.items() if name in known or name == unknown}

    @classmethod
    def _known(cls) -> set[str]:
        return {field.alias or name for name, field in cls.model_fields.items()}


class Lenient(Strict):
    """An object of OpenAI's API, whose unknown fields are ignored unless the server refuses them.

    Their names are appended to `IGNORED`. Misspelled fields of the server's own objects, such as
    documents and policies, are always errors."""

    @model_validator(mode="before")
    @classmethod
    def _ignore_unknown(cls, body: Any) -> Any:
        ignored = IGNORED.get()
        if ignored is None or not isinstance(body, dict):
            return body
        known = cls._known()
        ignored += [name for name in body if name not in known]
        return {name: value for name, value in body.items() if name in known}


class Defaulting(Strict):
    """A body in which null means the default, as if the field were absent."""

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {n: value for n, value in body.items() if value is not None or n not in optional}

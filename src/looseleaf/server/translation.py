"""Translation of other APIs' requests into chat requests, which the server answers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from looseleaf.server.errors import describe_invalid
from looseleaf.server.protocol.chat import ChatRequest
from looseleaf.server.protocol.common import EngineRequest, NeutralFields

_SHARED = EngineRequest.model_fields.keys() - NeutralFields.model_fields.keys()


@contextmanager
def translation() -> Iterator[None]:
    """Raises ApiError (400) for a body whose translation is no chat request."""
    try:
        yield
    except ValidationError as error:
        errors = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise describe_invalid(errors, {}) from error


def chat_request(body: EngineRequest, **fields: Any) -> ChatRequest:
    """The chat request with the shared fields of ``body`` and with ``fields``; None is left out."""
    shared = {name: getattr(body, name) for name in _SHARED}
    named = {name: value for name, value in {**shared, **fields}.items() if value is not None}
    return ChatRequest(**named)

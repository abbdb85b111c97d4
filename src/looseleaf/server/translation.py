"""Translation of other APIs' requests into chat requests, which the server answers."""

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import ValidationError

from looseleaf.server.errors import describe_invalid
from looseleaf.server.protocol.chat import ChatRequest
from looseleaf.server.protocol.common import EngineRequest, NeutralFields

Json = dict[str, Any]

_SHARED = EngineRequest.model_fields.keys() - NeutralFields.model_fields.keys()


def chat_request(body: EngineRequest, **fields: Any) -> ChatRequest:
    """The chat request with the shared fields of ``body`` and with ``fields``; None is left out.

    Raises ApiError (400) for fields that contradict each other."""
    shared = {name: getattr(body, name) for name in _SHARED}
    named = {name: value for name, value in {**shared, **fields}.items() if value is not None}
    try:
        return ChatRequest.model_validate(named)
    except ValidationError as error:
        errors = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        # paths in the chat request are none of the client's body
        raise describe_invalid(errors, {}) from error


def text_part(text: str) -> Json:
    """A part of a message's content."""
    return {"type": "text", "text": text}


def function_call(call_id: str | None, name: str, arguments: str) -> Json:
    """A call of an earlier answer."""
    return {"id": call_id, "function": {"name": name, "arguments": arguments}}


def alternating(messages: Iterable[Json]) -> Iterator[Json]:
    """``messages`` with adjacent ones of the same user or assistant joined.

    Many chat templates require that roles alternate. An assistant's parts of one turn, which some
    APIs send as separate items, are one message."""
    last: Json | None = None
    for message in messages:
        if last is not None and last["role"] == message["role"] != "tool":
            last = _joined(last, message)
            continue
        if last is not None:
            yield last
        last = message
    if last is not None:
        yield last


def _joined(first: Json, second: Json) -> Json:
    thoughts = [m["reasoning_content"] for m in (first, second) if m.get("reasoning_content")]
    calls = [*(first.get("tool_calls") or ()), *(second.get("tool_calls") or ())]
    content: Any = [*_parts(first), *_parts(second)]
    if all(part["type"] == "text" for part in content):
        content = "\n\n".join(part["text"] for part in content) or (None if calls else "")
    return {
        "role": first["role"],
        "content": content,
        "reasoning_content": "\n".join(thoughts) or None,
        "tool_calls": calls or None,
    }


def _parts(message: Json) -> list[Json]:
    content = message.get("content")
    if isinstance(content, list):
        return content
    return [text_part(content)] if content else []

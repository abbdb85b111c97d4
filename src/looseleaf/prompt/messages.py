"""Messages of a conversation in the form of chat templates, with places for their documents."""

from collections.abc import Mapping, Sequence
from typing import Any

from looseleaf.errors import InvalidRequest
from looseleaf.prompt.request import Document, Message


def with_system_text(text: str, messages: Sequence[Message]) -> list[Message]:
    """``messages`` with ``text`` prepended to their system message, or as a new one."""
    first = messages[0]
    if first.get("role") != "system":
        return [{"role": "system", "content": text}, *messages]
    own = first.get("content")
    if own is None:
        # rejected later, as any message without content
        return [*messages]
    content = [own] if isinstance(own, str | Document) else [*own]
    joint = text + "\n\n" if content != [""] else text
    return [{**first, "content": [joint, *content]}, *messages[1:]]


def plain_message(message: Message, documents: list[Document]) -> dict[str, object]:
    """``message`` with OpenAI-style content; appends its documents to ``documents``."""
    content = message.get("content")
    if isinstance(content, Document):
        content = [content]
    if not isinstance(content, list | tuple):
        return dict(message)
    parts: list[object] = []
    for part in content:
        if isinstance(part, Document):
            documents.append(part)
            parts.append({"type": "document"})
        elif isinstance(part, dict) and part.get("type") == "document":
            documents.append(_document_of(part))
            parts.append({"type": "document"})
        else:
            parts.append({"type": "text", "text": part} if isinstance(part, str) else part)
    return dict(message, content=parts)


def open_ended(message: dict[str, object]) -> dict[str, object]:
    """An assistant's message with a cut after its content, at which its continuation begins.

    Raises InvalidRequest for another role, and without content."""
    content = message.get("content")
    if message.get("role") != "assistant" or not content:
        raise InvalidRequest(
            "only an assistant's message with content can be continued: put one last, or let the "
            "model begin its own"
        )
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return dict(message, content=[*parts, {"type": "document"}])


def _document_of(part: Mapping[str, Any]) -> Document:
    """The document of a message part. Raises InvalidRequest for unknown fields."""
    unknown = set(part) - {"type", "text", "title", "context"}
    if unknown:
        raise InvalidRequest(
            f"a document in a message has text, title and context, not {min(unknown)}: leave it "
            "out; what is registered is found by its text"
        )
    return Document(part.get("text", ""), part.get("title"), part.get("context") or "lead")

"""The affinity of a request: the tags of its documents and of its conversation.

Reads the JSON body of any endpoint that takes documents. Invalid bodies have an affinity too,
because the replica reports their errors."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from looseleaf.router.tags import digest, registered_tag, response_tag, text_tag

CHARACTERS_PER_TOKEN = 4
"""Characters per token of usual text, for weights only."""

REGISTERED_TOKENS = 512
"""Weight of a registered document whose length is unknown to the router."""

_CONVERSATION_FIELDS = ("prompt_cache_key", "conversation", "previous_response_id")


@dataclass(frozen=True)
class Affinity:
    """Document tags with their weights in tokens, and the conversation's tag with its weight.

    ``registered`` are the ids of registered documents, without duplicates."""

    documents: tuple[tuple[str, int], ...] = ()
    conversation: str | None = None
    conversation_tokens: int = 0
    registered: tuple[str, ...] = ()


def affinity_of(body: object, session: str | None = None) -> Affinity:
    """The affinity of a request body; ``session`` is the client's own name of a conversation.

    The name may be the id of a stored response, which has the tag of its conversation."""
    if not isinstance(body, Mapping):
        body = {}
    weights: dict[str, int] = {}
    ids: dict[str, None] = {}
    for document in _documents(body):
        pair = _tagged(document)
        if pair is not None:
            weights.setdefault(*pair)
            if not _text(document):
                ids[document["id"]] = None
    beginning = _beginning(body)
    name = session or next((v for f in _CONVERSATION_FIELDS if (v := _string(body.get(f)))), None)
    tag = None
    if name is not None:
        tag = response_tag(name) or digest("session", [name])
    elif beginning:
        # equal questions about different documents are different conversations
        tag = digest("conversation", [*weights, *beginning])
    tokens = sum(map(len, _texts(body))) // CHARACTERS_PER_TOKEN
    return Affinity(tuple(weights.items()), tag, tokens if tag else 0, tuple(ids))


def _documents(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """All document objects of a body: of its list, then inside its messages."""
    for document in _list(body.get("documents")):
        if isinstance(document, Mapping):
            yield document
    for message in _messages(body):
        for part in _list(message.get("content")):
            if isinstance(part, Mapping) and part.get("type") == "document":
                yield part


def _tagged(document: Mapping[str, Any]) -> tuple[str, int] | None:
    text, document_id = _text(document), _string(document.get("id"))
    if text:
        return text_tag(_string(document.get("title")), text), 1 + len(text) // CHARACTERS_PER_TOKEN
    return (registered_tag(document_id), REGISTERED_TOKENS) if document_id else None


def _text(document: Mapping[str, Any]) -> str | None:
    """The text of a document, in this API's form or in that of Anthropic's messages."""
    source = document.get("source")
    inner = source.get("data") if isinstance(source, Mapping) else None
    return _string(document.get("text")) or _string(inner)


def _beginning(body: Mapping[str, Any]) -> list[str]:
    """The texts up to the first message of a user, which all turns of a conversation share."""
    texts = [_string(body.get("system")) or "", _string(body.get("instructions")) or ""]
    for message in _messages(body):
        texts += [_string(message.get("role")) or "", *_content(message)]
        if message.get("role") == "user":
            return texts
    return []


def _texts(body: Mapping[str, Any]) -> Iterator[str]:
    for message in _messages(body):
        yield from _content(message)
    yield from filter(None, (_string(body.get("prompt")), _string(body.get("system"))))


def _content(message: Mapping[str, Any]) -> Iterator[str]:
    content = message.get("content")
    if isinstance(content, str):
        yield content
    for part in _list(content):
        if isinstance(part, Mapping) and part.get("type") != "document":
            text = _string(part.get("text"))
            if text:
                yield text


def _messages(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for name in ("messages", "input"):
        content = body.get(name)
        if isinstance(content, str):
            yield {"role": "user", "content": content}
        for message in _list(content):
            if isinstance(message, Mapping):
                yield message


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _string(value: object) -> str | None:
    return value if isinstance(value, str) and value else None

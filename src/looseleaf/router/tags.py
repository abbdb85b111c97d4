"""Tags: short digests by which routers and replicas name documents and conversations.

A router has no tokenizer, so a tag is a digest of the client's text, not of tokens. Two documents
with one tag cost a cache miss at most, because replicas look segments up by their full keys."""

import hashlib
import re
from collections.abc import Iterable, Sequence

_DIGEST_BYTES = 8
_RESPONSE = re.compile(r"resp_([0-9a-f]{16})[0-9a-f]{32}")


def text_tag(title: str | None, text: str | Sequence[str]) -> str:
    """The tag of a document that a request sends as text; 16 hexadecimal digits."""
    texts = [text] if isinstance(text, str) else text
    return digest("text", [title or "", *texts])


def registered_tag(document_id: str) -> str:
    """The tag of a registered document; 16 hexadecimal digits."""
    return digest("registered", [document_id])


def response_tag(response_id: str) -> str | None:
    """The tag of a stored response's conversation, which is part of its id; None for others."""
    match = _RESPONSE.fullmatch(response_id)
    return None if match is None else match.group(1)


def digest(kind: str, parts: Iterable[str]) -> str:
    """A digest of texts under a kind; 16 hexadecimal digits."""
    state = hashlib.blake2b(kind.encode(), digest_size=_DIGEST_BYTES)
    for part in parts:
        # a client's text may contain half surrogates, which UTF-8 can't encode
        content = part.encode("utf-8", "surrogatepass")
        state.update(len(content).to_bytes(8, "little"))
        state.update(content)
    return state.hexdigest()

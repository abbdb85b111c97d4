"""Added tokens of a ``tokenizer.json``: which are special, and which are made so.

The library keeps a special token out of text on request, and takes any other out of it always.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from looseleaf.errors import CorruptCheckpoint

# characters of all that markers begin with and end with, some times what any tokenizer has
_MOST_OF_MARKERS = 1 << 26

Token = dict[str, Any]


def added_tokens(described: Mapping[str, Any]) -> Sequence[Token]:
    """The tokens as they are stated, so that a change of one changes ``described``."""
    return described.get("added_tokens") or ()


def special_tokens(described: Mapping[str, Any]) -> frozenset[str]:
    """The written forms of special tokens."""
    return frozenset(t["content"] for t in added_tokens(described) if t.get("special"))


def ordinary_tokens(described: Mapping[str, Any]) -> list[str]:
    """The written forms of added tokens that are not special."""
    return [t["content"] for t in added_tokens(described) if not t.get("special")]


def make_special(described: Mapping[str, Any], contents: Container[str]) -> bool:
    """Make added tokens of these ``contents`` special; whether any was not."""
    ordinary = [
        token
        for token in added_tokens(described)
        if token.get("content") in contents and not token.get("special")
    ]
    for token in ordinary:
        token["special"] = True
    return bool(ordinary)


def require_short(markers: Iterable[str]) -> None:
    """Raise CorruptCheckpoint for markers that are too long for what is made of them."""
    lengths = [len(marker) for marker in markers]
    if sum(length**2 for length in lengths) > _MOST_OF_MARKERS:
        raise CorruptCheckpoint(
            f"it has a special token of {max(lengths)} characters, which no model reads; download "
            "it again"
        )

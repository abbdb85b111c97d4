"""Added tokens of a ``tokenizer.json``, and their special flag.

The tokenizers library can treat special tokens in a text as characters. It always splits a text at
other added tokens.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from looseleaf.errors import CorruptCheckpoint

# limit on the characters of all prefixes and suffixes of markers
_MAX_AFFIX_CHARACTERS = 1 << 26

Token = dict[str, Any]


def added_tokens(described: Mapping[str, Any]) -> Sequence[Token]:
    """The entries of ``added_tokens`` themselves, not copies."""
    return described.get("added_tokens") or ()


def special_tokens(described: Mapping[str, Any]) -> frozenset[str]:
    """The written forms of special tokens."""
    return frozenset(t["content"] for t in added_tokens(described) if t.get("special"))


def ordinary_tokens(described: Mapping[str, Any]) -> list[str]:
    """The written forms of added tokens that are not special."""
    return [t["content"] for t in added_tokens(described) if not t.get("special")]


def make_special(described: Mapping[str, Any], contents: Container[str]) -> bool:
    """Set the special flag of tokens in ``contents``; returns whether a flag changed."""
    ordinary = [
        token
        for token in added_tokens(described)
        if token.get("content") in contents and not token.get("special")
    ]
    for token in ordinary:
        token["special"] = True
    return bool(ordinary)


def require_short(markers: Iterable[str]) -> None:
    """Raises CorruptCheckpoint if all prefixes and suffixes of ``markers`` exceed the limit."""
    lengths = [len(marker) for marker in markers]
    if sum(length**2 for length in lengths) > _MAX_AFFIX_CHARACTERS:
        raise CorruptCheckpoint(
            f"it has a special token of {max(lengths)} characters, which no model reads; download "
            "it again"
        )

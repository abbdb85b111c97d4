"""Limits of a ``tokenizer.json``, checked before the tokenizers library loads it.

The library normalizes added tokens while it loads, and can't be interrupted. Normalizer steps that
feed each other grow tokens exponentially. A regular expression may search them for minutes.
"""

import base64
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looseleaf.errors import CorruptCheckpoint
from looseleaf.models.checkpoint.fields import Json, mapping, rows, shown, text

_ADVICE = "use the tokenizer.json of a source that you trust"
_QUANTIFIER = re.compile(r"[*+?{]")
# growth by spaces around a Chinese character, and by a character per byte
_OPAQUE = {"BertNormalizer": 3.0, "ByteLevel": 4.0}

# None means any character
_Characters = frozenset[str] | None


@dataclass(frozen=True)
class TokenizerLimits:
    """Limits of a tokenizer, at least twice the values in use.

    ``growth`` is in characters per character of text, ``normalized`` in characters. ``searched``
    limits the characters of added tokens for regular expressions with several quantifiers.
    """

    tokens: int = 1 << 19
    merges: int = 1 << 20
    added_tokens: int = 1 << 18
    special_tokens: int = 1 << 14
    steps: int = 64
    growth: int = 4096
    normalized: int = 1 << 23
    searched: int = 1024


def require_limits(
    described: Json, path: Path, limits: TokenizerLimits = TokenizerLimits()
) -> None:
    """Raises CorruptCheckpoint if the tokenizer of the file ``path`` exceeds ``limits``."""
    try:
        _require_sizes(described, limits)
        _require_normalizer(described, limits)
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"{path}: {error}") from error


def _require_sizes(described: Json, limits: TokenizerLimits) -> None:
    model = mapping(described, "model")
    added = _added(described)
    special = sum(token.get("special") is True for token in added)
    _require_most("tokens in its vocabulary", _count(model.get("vocab")), limits.tokens)
    _require_most("merges", _count(model.get("merges")), limits.merges)
    _require_most("added tokens", len(added), limits.added_tokens)
    _require_most("special tokens", special, limits.special_tokens)


def _require_most(kind: str, count: int, most: int) -> None:
    if count > most:
        raise CorruptCheckpoint(f"it has {count} {kind}, and the limit is {most}; {_ADVICE}")


def _require_normalizer(described: Json, limits: TokenizerLimits) -> None:
    steps = list(_steps(described.get("normalizer")))
    _require_most("steps in its normalizer", len(steps), limits.steps)
    growth = _growth(steps)
    if growth > limits.growth:
        raise CorruptCheckpoint(
            f"its normalizer may make {growth:.3g} characters of one, and the limit is "
            f"{limits.growth}; {_ADVICE}"
        )
    added = _added(described)
    contents = [str(token.get("content")) for token in added if token.get("normalized") is True]
    count = sum(map(len, contents))
    _require_most("characters in normalized added tokens", int(count * growth), limits.normalized)
    patterns = [pattern for step in steps if (pattern := _regex(step)) is not None]
    risky = [pattern for pattern in patterns if len(_QUANTIFIER.findall(pattern)) > 1]
    if risky and count > limits.searched:
        raise CorruptCheckpoint(
            f"its normalizer searches {count} characters of added tokens for the regular "
            f"expression {shown(risky[0])}, and the limit is {limits.searched}; {_ADVICE}"
        )


def _steps(step: object) -> Iterator[Json]:
    """The steps of a normalizer in order, with nested sequences flattened."""
    stack = [step]
    while stack:
        current = stack.pop()
        if not isinstance(current, Mapping):
            continue
        if current.get("type") == "Sequence":
            stack += reversed(rows(current, "normalizers"))
        else:
            yield current


def _growth(steps: list[Json]) -> float:
    """An upper bound of the characters that a character becomes.

    Growth multiplies if a later step matches the output of an earlier step.
    """
    sources: list[tuple[_Characters, float]] = []
    for step in steps:
        pattern, written, factor = _effect(step)
        before = max(
            (
                growth
                for earlier, growth in sources
                if pattern is None or earlier is None or pattern & earlier
            ),
            default=1.0,
        )
        if written is None or written:
            sources.append((written, before * factor))
    return max((growth for _, growth in sources), default=1.0)


def _effect(step: Json) -> tuple[_Characters, _Characters, float]:
    """The characters that a step matches, the characters that it writes, and its growth."""
    kind = step.get("type")
    if kind == "Precompiled":
        return None, None, _longest_replacement(text(step, "precompiled_charsmap", ""))
    if kind in _OPAQUE:
        return None, None, _OPAQUE[kind]
    if kind == "Prepend":
        content = _folded(text(step, "prepend", ""))
        return None, frozenset(content), 1.0 + len(content)
    if kind != "Replace":
        # `_folded` covers the mappings of these steps
        return frozenset(), frozenset(), 1.0
    content = _folded(text(step, "content", ""))
    literal = mapping(step, "pattern").get("String")
    if not isinstance(literal, str) or not literal:
        return None, frozenset(content), 1.0 + len(content)
    return frozenset(_folded(literal)), frozenset(content), max(1.0, len(content) / len(literal))


def _folded(written: str) -> str:
    """``written`` after all normalizer steps without options."""
    return unicodedata.normalize("NFKD", written).casefold()


def _longest_replacement(charsmap: str) -> float:
    """The most characters that a precompiled map writes for a character."""
    try:
        content = base64.b64decode(charsmap)
    except ValueError:
        # the library reports the error
        return 1.0
    size = int.from_bytes(content[:4], "little")
    replacements = content[4 + size :].split(b"\0")
    return max(1.0, *(len(written.decode(errors="replace")) for written in replacements), 1.0)


def _regex(step: Json) -> str | None:
    if step.get("type") != "Replace":
        return None
    pattern: Any = mapping(step, "pattern").get("Regex")
    return pattern if isinstance(pattern, str) else None


def _added(described: Json) -> list[Json]:
    return [token for token in rows(described, "added_tokens") if isinstance(token, Mapping)]


def _count(value: object) -> int:
    return len(value) if isinstance(value, list | dict) else 0

"""The text and JSON files of a checkpoint, read under limits.

All JSON of a checkpoint is read here, so every malformed file raises CorruptCheckpoint. Limits are
checked before a parser sees the text.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looseleaf.errors import CheckpointNotFound, CorruptCheckpoint


@dataclass(frozen=True)
class JsonLimits:
    """The most bytes and values of a kind of file."""

    num_bytes: int
    num_values: int


# ten times the largest files in use
SETTINGS = JsonLimits(16 << 20, 1_000_000)
# a tokenizer of 262,144 tokens has a quarter of it
TOKENIZER = JsonLimits(128 << 20, 8_000_000)
# a mixture of 36,000 tensors has a sixth of it
TENSORS = JsonLimits(32 << 20, 4_000_000)
# the limit of the tokenizers library, below Python's own
_MAX_DEPTH = 128


def read_text(path: Path, limits: JsonLimits = SETTINGS) -> str:
    """The text of a file.

    Raises CheckpointNotFound if it is missing. Raises CorruptCheckpoint if it is not UTF-8, not
    readable or above ``limits``."""
    if not path.is_file():
        raise CheckpointNotFound(
            f"{path.parent} holds no {path.name}; save the tokenizer there with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    if (size := path.stat().st_size) > limits.num_bytes:
        raise CorruptCheckpoint(
            f"{path} is larger than the limit: it has {size} bytes, and such a file has "
            f"{limits.num_bytes} at most; download it again"
        )
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise CorruptCheckpoint(f"{path} is not UTF-8 text; download it again") from error
    except OSError as error:
        raise CorruptCheckpoint(
            f"{path} can't be read ({error.strerror}); see whose it is, or download it again"
        ) from error


def read_json(path: Path, unique: bool = False, limits: JsonLimits = SETTINGS) -> Mapping[str, Any]:
    """The JSON object in a file, empty for a missing file. Raises as `parse_json` does."""
    if not path.is_file():
        return {}
    value = parse_json(read_text(path, limits), path, unique, limits)
    if _is_deep(value):
        raise _unreadable(path, "it is nested too deep")
    return value


def parse_json(
    text: str, path: Path, unique: bool = False, limits: JsonLimits = SETTINGS
) -> dict[str, Any]:
    """The JSON object ``text``, read from ``path``.

    Raises CorruptCheckpoint for malformed JSON and other values than objects. Limits apply to the
    number of values, the length of numbers and the depth. Half of a surrogate pair is an error.
    ``unique`` also rejects a name that occurs twice in an object.
    """
    # each value follows one of these characters
    most = sum(map(text.count, ",[{"))
    if most > limits.num_values:
        raise CorruptCheckpoint(
            f"{path} has about {most} values, and such a file has {limits.num_values} at most; "
            "download it again"
        )
    try:
        value = json.loads(text, object_pairs_hook=_unique_object if unique else None)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise _unreadable(path, "it has half of a surrogate pair") from error
    except RecursionError as error:
        raise _unreadable(path, "it is nested too deep") from error
    except ValueError as error:
        # the text after a semicolon is advice for programmers
        raise _unreadable(path, str(error).split(";")[0]) from error
    if not isinstance(value, dict):
        raise CorruptCheckpoint(f"{path} is not a JSON object; download it again")
    return value


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise ValueError(f"{name[:200]!r} occurs twice")
        members[name] = value
    return members


def _unreadable(path: Path, reason: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"{path} can't be read as JSON ({reason}); download it again")


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True

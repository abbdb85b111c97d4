"""The small files beside a checkpoint's weights: text and JSON objects, whatever may be in them.

All JSON of a checkpoint is read here, so that what no JSON reader can follow is one error of ours.
Sizes are compared with limits before a parser sees the text.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looseleaf.errors import CheckpointNotFound, CorruptCheckpoint


@dataclass(frozen=True)
class JsonLimits:
    """The most bytes and values that a kind of file may have."""

    num_bytes: int
    num_values: int


# ten times as much as in the largest of models that are in use
SETTINGS = JsonLimits(16 << 20, 1_000_000)
# a tokenizer of 262,144 tokens has a quarter of it
TOKENIZER = JsonLimits(128 << 20, 8_000_000)
# a mixture of 36,000 tensors has a sixth of it
TENSORS = JsonLimits(32 << 20, 4_000_000)
# as many as the reader of tokenizer.json lets through; Python's own gives up at some hundreds, on
# the way back to text sooner than on the way from it
_MOST_LEVELS = 128


def read_text(path: Path, limits: JsonLimits = SETTINGS) -> str:
    """The text of a file. Raises CheckpointNotFound if it is missing, CorruptCheckpoint if it is no
    UTF-8, can't be read, or is larger than its kind may be."""
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
    """The JSON object in a file, empty if there is no file. Raises as `parse_json` does."""
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

    Raises CorruptCheckpoint for other JSON and for what is none, for more values than ``limits``
    has, for numbers of thousands of digits, deep nesting, half of a surrogate pair, which no
    message could show, and, where names are to be ``unique``, for one that stands twice in an
    object.
    """
    # before every value is one of these, and strings that have them hardly count
    most = sum(map(text.count, ",[{"))
    if most > limits.num_values:
        raise CorruptCheckpoint(
            f"{path} has about {most} values, and such a file has {limits.num_values} at most; "
            "download it again"
        )
    try:
        value = json.loads(text, object_pairs_hook=_once if unique else None)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise _unreadable(path, "it has half of a surrogate pair") from error
    except RecursionError as error:
        raise _unreadable(path, "it is nested too deep") from error
    except ValueError as error:
        # what is behind a semicolon is advice to programmers
        raise _unreadable(path, str(error).split(";")[0]) from error
    if not isinstance(value, dict):
        raise CorruptCheckpoint(f"{path} is not a JSON object; download it again")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for name, one in pairs:
        if name in value:
            raise ValueError(f"{name[:200]!r} stands there twice")
        value[name] = one
    return value


def _unreadable(path: Path, reason: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"{path} can't be read as JSON ({reason}); download it again")


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(_MOST_LEVELS + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True

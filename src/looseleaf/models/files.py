"""The small files beside a checkpoint's weights: text and JSON objects."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from looseleaf.errors import CheckpointNotFound, CorruptCheckpoint


def read_text(path: Path) -> str:
    """The text of a file. Raises CheckpointNotFound if it is missing, CorruptCheckpoint if it is no
    UTF-8."""
    if not path.is_file():
        raise CheckpointNotFound(
            f"{path.parent} holds no {path.name}; save the tokenizer there with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise CorruptCheckpoint(f"{path} is not UTF-8 text; download it again") from error


def read_json(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file, empty if there is no file. Raises CorruptCheckpoint."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except ValueError as error:
        raise CorruptCheckpoint(
            f"{path} can't be read as JSON ({error}); download it again"
        ) from error
    if not isinstance(value, dict):
        raise CorruptCheckpoint(f"{path} is not a JSON object; download it again")
    return value

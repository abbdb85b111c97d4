"""Checkpoints that are broken on purpose: how they are broken, and that they are refused by name.

Nothing may hang, fill the memory, or end in an error of Python's own.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from looseleaf.config import EngineConfig
from looseleaf.errors import ModelError
from looseleaf.llm.load import load_model
from looseleaf.models import read_advice

WEIGHTS = "model.safetensors"
SETTINGS = "tokenizer_config.json"
DEEP = "[" * 100_000 + "]" * 100_000
# texts that are no object
NO_OBJECTS = [DEEP, '{"a":' * 100_000 + "1" + "}" * 100_000, "[]", "{", "\xff", ""]


def use(folder: Path) -> None:
    """All that a server reads of a checkpoint."""
    read_advice(folder)
    load_model(folder, EngineConfig(device="cpu"))


def refused(folder: Path, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        use(folder)
    assert str(folder) in str(caught.value)
    # what can't be encoded can't be shown
    str(caught.value).encode()


def put(folder: Path, name: str, keys: str, written: str) -> None:
    """Writes JSON text where the dotted ``keys`` lead in the file ``name``."""
    path = folder / name
    whole = json.loads(path.read_text()) if path.exists() else {}
    *outer, last = keys.split(".")
    inner = whole
    for key in outer:
        inner = inner[key]
    inner[last] = "HERE"
    path.write_text(json.dumps(whole).replace('"HERE"', written))


def rewrite_header(
    folder: Path, change: Callable[[dict[str, Any]], object], data: Callable[[bytes], bytes] = bytes
) -> None:
    """Changes the header of the weights, and what follows it."""
    content = (folder / WEIGHTS).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    written = change(header)
    text = written if isinstance(written, str) else json.dumps(header)
    length = len(text.encode()).to_bytes(8, "little")
    (folder / WEIGHTS).write_bytes(length + text.encode() + data(content[end:]))

"""The state of a checkpoint's files, to detect changes while a model loads.

A change between two reads would store keys of one model under another model's fingerprint.
"""

import os
from pathlib import Path
from typing import NamedTuple

from looseleaf.errors import CorruptCheckpoint
from looseleaf.models.checkpoint.gguf.folder import stored_files

_NAMES = (
    *("config.json", "generation_config.json", "model.safetensors.index.json", "gguf.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
)
_PATTERNS = ("*.safetensors", "additional_chat_templates/*.jinja")


class FileState(NamedTuple):
    """Size and times, in bytes and ns. ``changed_ns`` is the inode's, which programs can't set."""

    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileState":
        return cls(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def folder_state(folder: Path) -> dict[str, FileState]:
    """The state of each file of a model, by its name in ``folder`` or its path elsewhere."""
    paths = [folder / name for name in _NAMES]
    paths += [path for pattern in _PATTERNS for path in folder.glob(pattern)]
    named = {str(path.relative_to(folder)): path for path in paths}
    named |= {str(path): path for path in stored_files(folder)}
    states = {}
    for name, path in named.items():
        try:
            states[name] = FileState.of(path.stat())
        except OSError:
            # the reader of a missing file raises a better error
            continue
    return states


def require_unchanged(folder: Path, before: dict[str, FileState]) -> None:
    """Raises CorruptCheckpoint if `folder_state` is no longer ``before``."""
    after = folder_state(folder)
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            raise changed_meanwhile(folder / name)


def changed_meanwhile(path: Path) -> CorruptCheckpoint:
    """The error for a file that changes while it is read."""
    return CorruptCheckpoint(
        f"{path} changed while the model was loaded; wait until the file is complete, and load it "
        "again"
    )

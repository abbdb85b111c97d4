"""A GGUF file as the folder of a checkpoint: JSON files in the cache, and a table of its tensors.

The folder's name is a digest of the file's path, size and header, so it is made once and never
changes. Tensors stay in the file.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from looseleaf.errors import CorruptCheckpoint
from looseleaf.models.checkpoint.files import TENSORS, read_json
from looseleaf.models.checkpoint.gguf.architectures import ROPE_TENSORS, config_fields
from looseleaf.models.checkpoint.gguf.container import (
    MAGIC,
    Container,
    StoredTensor,
    read_container,
)
from looseleaf.models.checkpoint.gguf.metadata import Metadata
from looseleaf.models.checkpoint.gguf.tensor_table import BlockEntry, table_of
from looseleaf.models.checkpoint.gguf.vocabulary import end_ids, tokenizer_files
from looseleaf.ops.native.native_build import cache_folder, can_write_to, process_folder

TABLE_NAME = "gguf.json"
SUFFIX = ".gguf"
# part of each folder's name: another version of this code makes other files
_VERSION = 4
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MOST_PARTS = 1024
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def is_gguf(path: Path) -> bool:
    """Whether ``path`` is a file in the GGUF format, by its suffix or its first bytes."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return path.suffix == SUFFIX or file.read(4) == MAGIC
    except OSError:
        return False


def folder_of_gguf(path: Path) -> Path:
    """The folder of the checkpoint in ``path``, a file or any part of a split file.

    Raises CorruptCheckpoint and UnsupportedModel."""
    containers = [read_container(part) for part in _parts(path.resolve())]
    root, name = cache_folder().parent / "gguf", _name(containers)
    # a cache that can't be written may hold the folder
    if not (root / name / TABLE_NAME).is_file() and not can_write_to(root):
        root = process_folder() / "gguf"
        root.mkdir(exist_ok=True)
    target = root / name
    if (target / TABLE_NAME).is_file():
        return target
    files = _files(containers)
    try:
        _write_folder(target, files)
    except OSError as error:
        raise CorruptCheckpoint(
            f"the configuration of {path} can't be written into {root} ({error.strerror}): make "
            "room, or set XDG_CACHE_HOME to another folder"
        ) from error
    return target


def _write_folder(target: Path, files: Mapping[str, Any]) -> None:
    """Make the folder ``target`` of JSON files atomically, unless another process has made it."""
    scratch = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        for name, content in files.items():
            (scratch / name).write_text(json.dumps(content, ensure_ascii=False), "utf-8")
        os.rename(scratch, target)
    except OSError:
        # another process made it first
        if not (target / TABLE_NAME).is_file():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def read_table(folder: Path) -> dict[str, BlockEntry]:
    """The tensors of a folder that `folder_of_gguf` made, by name. Raises CorruptCheckpoint."""
    stored = read_json(folder / TABLE_NAME, limits=TENSORS)["tensors"]
    entries = [
        BlockEntry(**{**item, "path": Path(item["path"]), "shape": tuple(item["shape"])})
        for item in stored
    ]
    ends: dict[Path, int] = {}
    for entry in entries:
        ends[entry.path] = max(ends.get(entry.path, 0), entry.end)
    for path, end in ends.items():
        if not path.is_file() or path.stat().st_size < end:
            raise CorruptCheckpoint(f"{path} is missing or shorter than its header says")
    return {entry.name: entry for entry in entries}


def stored_files(folder: Path) -> list[Path]:
    """The GGUF files with the tensors of a folder; empty if no GGUF file made it."""
    if not (folder / TABLE_NAME).is_file():
        return []
    return [Path(name) for name in read_json(folder / TABLE_NAME, limits=TENSORS)["files"]]


def _parts(path: Path) -> list[Path]:
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    if not 0 < count <= _MOST_PARTS:
        raise CorruptCheckpoint(f"{path} is named as a part of {count}, and there are 1 to 1024")
    parts = [path.with_name(f"{match[1]}-{n:05}-of-{match[3]}.gguf") for n in range(1, count + 1)]
    absent = [part.name for part in parts if not part.is_file()]
    if absent:
        raise CorruptCheckpoint(
            f"{path.parent} lacks {absent[0]}, a part of the split file; finish the download"
        )
    return parts


def _name(containers: list[Container]) -> str:
    digest = hashlib.blake2b(str(_VERSION).encode(), digest_size=16)
    for container in containers:
        identity = f"{container.path}\0{container.path.stat().st_size}\0"
        digest.update(identity.encode("utf-8", "surrogateescape") + container.digest)
    return digest.hexdigest()


def _files(containers: list[Container]) -> dict[str, Any]:
    path = containers[0].path
    tensors = [tensor for container in containers for tensor in container.tensors]
    names = frozenset(tensor.name for tensor in tensors)
    if len(names) < len(tensors):
        raise CorruptCheckpoint(f"two parts of {path} hold one tensor; download them again")
    stated = containers[0].metadata.get("split.tensors.count")
    if stated is not None and stated != len(tensors):
        raise CorruptCheckpoint(
            f"the parts of {path} hold {len(tensors)} tensors, and split.tensors.count is {stated}"
        )
    data = Metadata(containers[0])
    floats = {t.name: _floats(t) for t in tensors if t.name in ROPE_TENSORS}
    config = config_fields(data, names, floats)
    files: dict[str, Any] = dict(tokenizer_files(data))
    config["eos_token_id"] = end_ids(data, data.strings("tokenizer.ggml.tokens"))
    table = [{**asdict(entry), "path": str(entry.path)} for entry in table_of(tensors, config)]
    config["torch_dtype"] = _dtype(tensors)
    paths = [str(container.path) for container in containers]
    return {**files, "config.json": config, TABLE_NAME: {"files": paths, "tensors": table}}


def _dtype(tensors: Iterable[StoredTensor]) -> str:
    """The dtype of a model: that of its matrices, and bf16 if one is quantized."""
    formats = {tensor.format for tensor in tensors if len(tensor.shape) > 1}
    return _DTYPES[formats.pop()] if len(formats) == 1 and formats <= _DTYPES.keys() else "bfloat16"


def _floats(tensor: StoredTensor) -> np.ndarray:
    if tensor.format != "F32":
        raise CorruptCheckpoint(f"{tensor.path}: {tensor.name} is {tensor.format}, not F32")
    content = np.fromfile(tensor.path, "<f4", (tensor.end - tensor.start) // 4, offset=tensor.start)
    return content

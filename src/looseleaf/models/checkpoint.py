"""The tensor files of a checkpoint: which file holds which tensor, and whether the files are whole.

Only safetensors. Its header is read here by hand (eight bytes of length, then JSON), because that
is enough to name, to check and to fingerprint every tensor without loading any.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looseleaf.errors import CheckpointNotFound, CorruptCheckpoint, UnsupportedModel

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
GGUF_ADVICE = "Looseleaf reads safetensors; give the folder of the model that it was made from"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_READ_BYTES = 4 << 20


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: dtype as safetensors spells it, and where its bytes are."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def list_tensors(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of the checkpoint by name; its files are whole and agree with the index.

    A single file is read though an index is there, as Transformers does: a model that is saved
    again over its shards leaves their index behind.
    """
    index_path = folder / INDEX_NAME
    if (folder / SINGLE_NAME).is_file() or not index_path.is_file():
        return {entry.name: entry for path in _files(folder) for entry in _read_header(path)}
    weight_map = _read_index(index_path)
    entries: dict[str, TensorEntry] = {}
    for name in sorted(set(weight_map.values())):
        path = folder / name
        if not path.is_file():
            raise CorruptCheckpoint(
                f"{folder}: {INDEX_NAME} points to {name}, which is missing; finish the download"
            )
        entries.update({entry.name: entry for entry in _read_header(path)})
    absent = sorted(set(weight_map) - set(entries))
    if absent:
        raise CorruptCheckpoint(
            f"{folder}: {INDEX_NAME} lists tensors that no file holds: {some(absent)}; "
            "download it again"
        )
    return entries


def refuse_other_formats(folder: Path) -> None:
    """Raises UnsupportedModel for an adapter, alone or beside a model, and for GGUF alone."""
    if (folder / "adapter_config.json").is_file():
        raise UnsupportedModel(
            f"{folder} holds an adapter, and adapters are not applied: merge it into its model "
            "with peft's merge_and_unload(), save that, and give its folder"
        )
    if any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors")):
        raise UnsupportedModel(f"{folder} holds GGUF: {GGUF_ADVICE}")


def misfit(folder: Path) -> str:
    """Why names of tensors may not be those that config.json asks for, for an error message."""
    given = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures")
    others = [name for name in given or [] if not str(name).endswith("ForCausalLM")]
    if others:
        return f"config.json says {others[0]}, and Looseleaf runs models ...ForCausalLM"
    return "config.json and the weights do not fit together"


def same_bytes(one: TensorEntry, other: TensorEntry) -> bool:
    """Whether two tensors are stored alike, to the bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.path.open("rb") as first, other.path.open("rb") as second:
        for offset in range(0, one.end - one.start, _READ_BYTES):
            length = min(_READ_BYTES, one.end - one.start - offset)
            pieces = (
                os.pread(file.fileno(), length, entry.start + offset)
                for file, entry in ((first, one), (second, other))
            )
            if len(set(pieces)) > 1:
                return False
    return True


def some(names: list[str], limit: int = 4) -> str:
    """The first few of ``names`` for an error message."""
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def _files(folder: Path) -> list[Path]:
    single = folder / SINGLE_NAME
    if single.is_file():
        return [single]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise CorruptCheckpoint(
            f"{folder} holds {len(found)} safetensors files but no {INDEX_NAME}; "
            "download the index too"
        )
    if any(path.suffix in _PICKLE_SUFFIXES for path in folder.iterdir()):
        raise UnsupportedModel(
            f"{folder} holds pickle weights only, which can run code when opened; convert "
            "them with transformers' save_pretrained(..., safe_serialization=True) or pick a "
            "safetensors revision"
        )
    raise CheckpointNotFound(f"{folder} holds no *.safetensors file; finish the download")


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if all(os.path.basename(name) == name for name in weight_map.values()):
            return dict(weight_map)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CorruptCheckpoint(f"{path} is not a safetensors index; download it again") from error
    raise CorruptCheckpoint(
        f"{path} points outside its folder; get the checkpoint from a source you trust"
    )


def _read_header(path: Path) -> list[TensorEntry]:
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= size - 8:
                raise ValueError("no header")
            header: dict[str, Any] = json.loads(file.read(length))
        entries = [
            TensorEntry(
                path, name, item["dtype"], tuple(item["shape"]), *_offsets(item, 8 + length)
            )
            for name, item in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(
            f"{path} is not a whole safetensors file ({error}); download it again"
        ) from error
    needed = max((entry.end for entry in entries), default=8 + length)
    if size != needed:
        raise CorruptCheckpoint(
            f"{path} is {size} bytes long but its header describes {needed}; download it again"
        )
    return entries


def _offsets(item: dict[str, Any], base: int) -> tuple[int, int]:
    start, end = item["data_offsets"]
    return base + start, base + end

"""The tensor files of a checkpoint: which file holds which tensor, and whether the files are whole.

Only safetensors, by what ``header`` reads of each file.
"""

import os
from pathlib import Path

from looseleaf.errors import CheckpointNotFound, CorruptCheckpoint, UnsupportedModel
from looseleaf.models.checkpoint.files import TENSORS, read_json
from looseleaf.models.checkpoint.header import MOST_TENSORS, TensorEntry, read_header

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
GGUF_ADVICE = "Looseleaf reads safetensors; give the folder of the model that it was made from"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_READ_BYTES = 4 << 20
# a model of a terabyte has 200
_MOST_FILES = 4096


def list_tensors(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of the checkpoint by name; its files are whole and agree with the index.

    A single file is read though an index is there, as Transformers does: a model that is saved
    again over its shards leaves their index behind.
    """
    index_path = folder / INDEX_NAME
    if (folder / SINGLE_NAME).is_file() or not index_path.is_file():
        return {entry.name: entry for path in _files(folder) for entry in read_header(path)}
    weight_map = _read_index(index_path)
    entries: dict[str, TensorEntry] = {}
    count = 0
    for name in sorted(set(weight_map.values())):
        if not _is_there(folder / name):
            raise CorruptCheckpoint(
                f"{folder}: {INDEX_NAME} points to {name[:200]}, which is missing; "
                "finish the download"
            )
        header = read_header(folder / name)
        count += len(header)
        if count > MOST_TENSORS:
            raise CorruptCheckpoint(
                f"{folder}: the files that {INDEX_NAME} names hold more than the {MOST_TENSORS} "
                "tensors that a model has at most; download it again"
            )
        for entry in header:
            # of a tensor that several files hold, the index says which counts
            if weight_map.get(entry.name, name) == name:
                entries[entry.name] = entry
    absent = sorted(set(weight_map) - set(entries))
    if absent:
        raise CorruptCheckpoint(
            f"{folder}: {INDEX_NAME} lists tensors in files that do not hold them: {some(absent)}; "
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
    given = read_json(folder / "config.json").get("architectures")
    names = given if isinstance(given, list) else []
    others = [str(name) for name in names if not str(name).endswith("ForCausalLM")]
    if others:
        return f"config.json says {others[0][:200]}, and Looseleaf runs models ...ForCausalLM"
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


def some(names: list[str]) -> str:
    """The first few of ``names`` for an error message."""
    rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(name[:200] for name in names[:4]) + rest


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


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        # a name that no file can have
        return False


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path, unique=True, limits=TENSORS).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise CorruptCheckpoint(f"{path} is not a safetensors index; download it again")
    num_files = len({*weight_map.values()})
    if len(weight_map) > MOST_TENSORS or num_files > _MOST_FILES:
        raise CorruptCheckpoint(
            f"{path} lists {len(weight_map)} tensors in {num_files} files, and a model has "
            f"{MOST_TENSORS} in {_MOST_FILES} at most; download it again"
        )
    if any(
        os.path.basename(name) != name or name in ("", ".", "..") for name in weight_map.values()
    ):
        raise CorruptCheckpoint(
            f"{path} points outside its folder; get the checkpoint from a source you trust"
        )
    return weight_map

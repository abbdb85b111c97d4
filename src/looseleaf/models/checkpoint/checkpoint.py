"""The tensor table of a checkpoint: the file of each tensor, and checks that files are complete.

Safetensors files are read by their headers. A folder made from a GGUF file has a table.
"""

import os
from pathlib import Path

from looseleaf.errors import CheckpointNotFound, CorruptCheckpoint, UnsupportedModel
from looseleaf.models.checkpoint.files import TENSORS, read_json
from looseleaf.models.checkpoint.gguf.folder import TABLE_NAME, read_table
from looseleaf.models.checkpoint.header import MOST_TENSORS, TensorEntry, read_header

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_READ_BYTES = 4 << 20
# a model of 1 TB has 200
_MAX_FILES = 4096


def list_tensors(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of the checkpoint by name. Raises CorruptCheckpoint and its kin.

    A single file takes precedence over an index, as in Transformers: saving a model over its shards
    leaves their index in place.
    """
    if (folder / TABLE_NAME).is_file():
        return {**read_table(folder)}
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
            # several files may hold a tensor; the index selects one
            if weight_map.get(entry.name, name) == name:
                entries[entry.name] = entry
    absent = sorted(set(weight_map) - set(entries))
    if absent:
        raise CorruptCheckpoint(
            f"{folder}: {INDEX_NAME} lists tensors in files that do not hold them: "
            f"{shortened(absent)}; download it again"
        )
    return entries


def refuse_other_formats(folder: Path) -> None:
    """Raises UnsupportedModel for a folder with an adapter."""
    if (folder / "adapter_config.json").is_file():
        raise UnsupportedModel(
            f"{folder} holds an adapter, and adapters are not applied: merge it into its model "
            "with peft's merge_and_unload(), save that, and give its folder"
        )


def misfit(folder: Path) -> str:
    """The reason for unexpected tensor names, for an error message."""
    value = read_json(folder / "config.json").get("architectures")
    names = value if isinstance(value, list) else []
    unsupported = [str(name) for name in names if not str(name).endswith("ForCausalLM")]
    if unsupported:
        return f"config.json says {unsupported[0][:200]}, and Looseleaf runs models ...ForCausalLM"
    return "config.json and the weights do not fit together"


def same_bytes(first: TensorEntry, second: TensorEntry) -> bool:
    """Whether two tensors have the same dtype, shape and bytes."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    with first.path.open("rb") as first_file, second.path.open("rb") as second_file:
        for offset in range(0, first.end - first.start, _READ_BYTES):
            length = min(_READ_BYTES, first.end - first.start - offset)
            pieces = (
                os.pread(file.fileno(), length, entry.start + offset)
                for file, entry in ((first_file, first), (second_file, second))
            )
            if len(set(pieces)) > 1:
                return False
    return True


def shortened(names: list[str]) -> str:
    """The first four of ``names`` and the count of the rest, for an error message."""
    rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(name[:200] for name in names[:4]) + rest


def _files(folder: Path) -> list[Path]:
    single = folder / SINGLE_NAME
    if single.is_file():
        return [single]
    paths = sorted(folder.glob("*.safetensors"))
    if len(paths) == 1:
        return paths
    if paths:
        raise CorruptCheckpoint(
            f"{folder} holds {len(paths)} safetensors files but no {INDEX_NAME}; "
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
        # the name is too long or malformed
        return False


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path, unique=True, limits=TENSORS).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise CorruptCheckpoint(f"{path} is not a safetensors index; download it again")
    num_files = len({*weight_map.values()})
    if len(weight_map) > MOST_TENSORS or num_files > _MAX_FILES:
        raise CorruptCheckpoint(
            f"{path} lists {len(weight_map)} tensors in {num_files} files, and a model has "
            f"{MOST_TENSORS} in {_MAX_FILES} at most; download it again"
        )
    if any(
        os.path.basename(name) != name or name in ("", ".", "..") for name in weight_map.values()
    ):
        raise CorruptCheckpoint(
            f"{path} points outside its folder; get the checkpoint from a source you trust"
        )
    return weight_map

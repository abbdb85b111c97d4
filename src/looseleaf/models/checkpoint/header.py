"""The header of a safetensors file, read and verified without loading tensors.

A header is eight bytes of length, then JSON. Checks follow the format: tensors cover the bytes from
the header's end to the file's end. Each tensor of a supported dtype has the bytes of its shape.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from looseleaf.errors import CorruptCheckpoint
from looseleaf.models.checkpoint.fields import shown
from looseleaf.models.checkpoint.files import TENSORS, parse_json

# bytes of an element, by the format's name
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# per checkpoint; a mixture of 256 experts in 61 layers has fewer
MOST_TENSORS = 1 << 16
# PyTorch's own limit
_MAX_DIMS = 64


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: its dtype in safetensors' spelling, and its byte range."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> list[TensorEntry]:
    """Every tensor of a file, in the header's order. Raises CorruptCheckpoint."""
    try:
        size = path.stat().st_size
        # reading a pipe would block
        if not path.is_file():
            raise ValueError("it is no file")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= size - 8:
                raise ValueError("no header")
            if length > TENSORS.num_bytes:
                raise ValueError(
                    f"its header has {length} bytes, and a header has {TENSORS.num_bytes} at most"
                )
            written = file.read(length).decode()
        header = parse_json(written, path, unique=True, limits=TENSORS)
        if len(header) > MOST_TENSORS:
            raise ValueError(
                f"it lists {len(header)} tensors, and a model has {MOST_TENSORS} at most"
            )
        entries = [
            _entry(path, 8 + length, name, item)
            for name, item in header.items()
            if name != "__metadata__"
        ]
        needed = _end_of(entries, 8 + length)
    except (ValueError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CorruptCheckpoint(
            f"{path} is not a whole safetensors file ({reason}); download it again"
        ) from error
    if size != needed:
        raise CorruptCheckpoint(
            f"{path} is {size} bytes long but its header describes {needed}; download it again"
        )
    return entries


def _entry(path: Path, base: int, name: str, item: Any) -> TensorEntry:
    dtype, shape, offsets = (
        item.get(key) if isinstance(item, dict) else None
        for key in ("dtype", "shape", "data_offsets")
    )
    if not isinstance(dtype, str):
        raise ValueError(f"{shown(name)} has no dtype")
    if not _are_counts(shape):
        raise ValueError(f"{shown(name)} has no shape")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{shown(name)} has no data_offsets")
    start, end = offsets
    if dtype in FLOATS and math.prod(shape) * FLOATS[dtype] != end - start:
        raise ValueError(f"{shown(name)} has not the bytes of its shape")
    return TensorEntry(path, name, dtype, tuple(shape), base + start, base + end)


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or len(value) > _MAX_DIMS:
        return False
    # bool is a subclass of int
    return all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _end_of(entries: list[TensorEntry], base: int) -> int:
    """The end of the last tensor. Raises ValueError if tensors from ``base`` leave a gap."""
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.end)):
        if entry.start != base:
            raise ValueError(f"{shown(entry.name)} does not begin where the one before it ends")
        base = entry.end
    return base

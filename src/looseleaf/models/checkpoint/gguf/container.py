"""The container of a GGUF file: metadata, and the place of each tensor.

Numbers and block sizes are those of the ``gguf`` package. Its reader has no limits, and hostile
counts keep it busy without end. Here every count is checked before its use.
"""

import hashlib
import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from looseleaf.errors import CorruptCheckpoint, UnsupportedModel
from looseleaf.models.checkpoint.fields import shown
from looseleaf.models.checkpoint.header import MOST_TENSORS

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# far above the values of real files
_MOST_FIELDS, _MOST_VALUES, _MOST_DIMS, _LONGEST_NAME = 4096, 8_000_000, 4, 1024
_LONGEST_STRING = 16 << 20
_ALIGNMENT = "general.alignment"

_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "<u1",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclass(frozen=True)
class Strings:
    """An array of strings, decoded on demand: its bytes, and the end of each string in them."""

    content: bytes
    ends: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[str]:
        start = 0
        for end in self.ends:
            # each string follows its length
            yield self.content[start + 8 : end].decode("utf-8", "replace")
            start = end


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file: its format's name, its shape as in PyTorch, and its byte range."""

    path: Path
    name: str
    format: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Container:
    """The metadata by key, the tensors, and a digest of both.

    Values of metadata are scalars, NumPy arrays and `Strings`."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: tuple[StoredTensor, ...]
    digest: bytes


def read_container(path: Path) -> Container:
    """The container ``path``. Raises CorruptCheckpoint and UnsupportedModel."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(path, data).container()
    except (ValueError, OSError, struct.error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CorruptCheckpoint(
            f"{path} is not a whole GGUF file ({reason}); download it again"
        ) from error


class _Cursor:
    """Reads a file from its start. Raises ValueError for values that the file can't hold."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._size, self._at = path, data, len(data), 0
        self._values = 0

    def container(self) -> Container:
        if self._take(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("<u4")
        if version not in _VERSIONS:
            raise UnsupportedModel(
                f"{self._path} is GGUF of version {version}, and versions 2 and 3 in little-endian "
                "order are read; convert it again"
            )
        num_tensors, num_fields = self._number("<u8"), self._number("<u8")
        self._require_most("tensors", num_tensors, MOST_TENSORS)
        self._require_most("metadata fields", num_fields, _MOST_FIELDS)
        metadata = {}
        for _ in range(num_fields):
            key = self._string("a key")
            metadata[key] = self._value(self._kind(key), key)
        infos = [self._info() for _ in range(num_tensors)]
        alignment = metadata.get(_ALIGNMENT, 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 16:
            raise ValueError(f"{_ALIGNMENT} is {shown(alignment)}")
        base = -(-self._at // alignment) * alignment
        tensors = tuple(self._tensor(base, *info) for info in infos)
        if len({tensor.name for tensor in tensors}) < len(tensors):
            raise ValueError("two tensors have one name")
        header = hashlib.blake2b(self._data[: self._at], digest_size=16).digest()
        return Container(self._path, metadata, tensors, header)

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("a tensor's name")
        num_dims = self._number("<u4")
        if len(name) > _LONGEST_NAME or num_dims > _MOST_DIMS:
            raise ValueError(f"{shown(name)} has a name or a shape that no tensor has")
        shape = tuple(self._number("<u8") for _ in range(num_dims))
        return name, shape[::-1], self._number("<u4"), self._number("<u8")

    def _tensor(
        self, base: int, name: str, shape: tuple[int, ...], number: int, offset: int
    ) -> StoredTensor:
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise UnsupportedModel(
                f"{self._path}: {shown(name)} is stored in format {number}, which is not known"
            ) from None
        if not all(shape):
            raise ValueError(f"{shown(name)} has a dim of 0")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape and shape[-1] % block:
            raise ValueError(f"rows of {shown(name)} are not whole blocks of {kind.name}")
        start = base + offset
        end = start + math.prod(shape) // block * block_bytes
        if end > self._size:
            raise ValueError(f"{shown(name)} ends at byte {end} of {self._size}")
        return StoredTensor(self._path, name, kind.name, shape, start, end)

    def _kind(self, key: str) -> GGUFValueType:
        number = self._number("<u4")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise ValueError(f"{shown(key)} has the unknown type {number}") from None

    def _value(self, kind: GGUFValueType, key: str) -> Any:
        if kind is GGUFValueType.STRING:
            return self._string(key)
        if kind is GGUFValueType.ARRAY:
            return self._array(key)
        value = self._scalar(_SCALARS[kind])
        return bool(value) if kind is GGUFValueType.BOOL else value

    def _array(self, key: str) -> Any:
        kind, count = self._kind(key), self._number("<u8")
        self._values += count
        self._require_most(f"values in arrays up to {shown(key)}", self._values, _MOST_VALUES)
        if kind is GGUFValueType.ARRAY:
            raise ValueError(f"{shown(key)} is an array of arrays")
        if kind is not GGUFValueType.STRING:
            dtype = np.dtype(_SCALARS[kind])
            return np.frombuffer(self._take(count * dtype.itemsize), dtype)
        start, ends = self._at, []
        for _ in range(count):
            self._skip_string(key)
            ends.append(self._at - start)
        return Strings(self._data[start : self._at], tuple(ends))

    def _string(self, key: str) -> str:
        start = self._at
        self._skip_string(key)
        return self._data[start + 8 : self._at].decode("utf-8", "replace")

    def _skip_string(self, key: str) -> None:
        (length,) = struct.unpack_from("<Q", self._data, self._at)
        if length > min(_LONGEST_STRING, self._size - self._at - 8):
            raise ValueError(f"a string of {shown(key)} has {length} bytes")
        self._at += 8 + length

    def _number(self, dtype: str) -> int:
        return int(self._scalar(dtype))

    def _scalar(self, dtype: str) -> Any:
        size = np.dtype(dtype).itemsize
        return np.frombuffer(self._take(size), dtype)[0].item()

    def _take(self, count: int) -> bytes:
        if count > self._size - self._at:
            raise ValueError(f"it ends at byte {self._size}, and a value needs {count} more")
        self._at += count
        return self._data[self._at - count : self._at]

    def _require_most(self, kind: str, count: int, most: int) -> None:
        if count > most:
            raise ValueError(f"it states {count} {kind}, and a model has {most} at most")

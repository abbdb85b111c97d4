"""Records and side-cars as bytes of a file: the safetensors layout, with a version and checksums.

A header names arrays and where they stand; its metadata has a CRC-32 of every array and one of the
header itself. Any safetensors reader can open what is written here. The checks are against faults,
not against forgery: who can write to a tier can say what he likes in it.

An array of a record is ``k.N`` or ``v.N``, K or V of layer N, ``[pages, kv_heads, page_size,
head_dim]``; both of a layer are one run of bytes with one checksum, in the metadata as ``layers``.
A record that is packed has one array ``packed.N`` of bytes a layer, and shape and dtype of what was
packed in the metadata.
"""

import errno
import json
import math
import os
import stat
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from looseleaf.kv.keys import SegmentKey
from looseleaf.tiers.stores.base import Record, TierFault

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

VERSION = "1"
_RECORD, _SIDECAR = "looseleaf segment", "looseleaf side-car"
_BLANK = "0" * 8
# a header longer than this was not written here
_LONGEST_HEADER = 16 << 20
# where there are no locks, what was not written to for a day is nobody's
_ABANDONED_SECONDS = 24 * 60 * 60
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
}
# a pipe without a writer would keep its reader waiting
_TO_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in files; raises ValueError for one that they can't hold."""
    if dtype not in _NAMES:
        raise ValueError(f"tiers can't hold {dtype}: they hold {', '.join(_DTYPES)}")
    return _NAMES[dtype]


@dataclass(frozen=True)
class RecordHeader:
    """A record's header as read: where its bytes begin, and the checksum of every layer."""

    record: Record
    size: int
    checksums: tuple[str, ...]

    @property
    def file_size(self) -> int:
        return self.size + self.record.num_bytes

    def check_layer(self, layer: int, content: UInt8[Tensor, " layer_bytes"]) -> None:
        """Raise TierFault unless ``content`` is what was stored."""
        if checksum(content) != self.checksums[layer]:
            raise TierFault("damaged", f"layer {layer} is not what was stored")


def raw(content: UInt8[Tensor, " bytes"]) -> memoryview:
    """The memory of a tensor on the host."""
    return content.numpy().data


def checksum(content: UInt8[Tensor, " bytes"]) -> str:
    """Eight hexadecimal digits that a flipped bit, or a few, always change."""
    return f"{zlib.crc32(raw(content)):08x}"


def encode_record(record: Record, layers: UInt8[Tensor, "layers layer_bytes"]) -> bytes:
    """The header of a record; ``layers`` follows it in the file."""
    size, shape = record.layer_bytes, list(record.layer_shape[1:])
    if record.packed:
        arrays = [(f"packed.{layer}", "U8", [size], size) for layer in range(record.num_layers)]
    else:
        arrays = [
            (f"{letter}.{layer}", record.dtype, shape, size // 2)
            for layer in range(record.num_layers)
            for letter in "kv"
        ]
    sums = " ".join(checksum(layers[layer]) for layer in range(record.num_layers))
    about = {
        "key": record.key.hex(),
        "length": str(record.length),
        "tenant": record.tenant,
        "layers": sums,
    }
    if record.packed:
        about |= {"packed": json.dumps({"shape": shape, "dtype": record.dtype})}
    return _header(_RECORD, arrays, about)


def decode_record(header: bytes, key: SegmentKey) -> RecordHeader:
    """The record that a header describes. Raises TierFault unless it is one of ``key``, written by
    this version, and unharmed."""
    content, about = _decode(header, _RECORD)
    try:
        sums, packed = tuple(about["layers"].split()), "packed" in about
        told = json.loads(about["packed"]) if packed else content["k.0"]
        shape, dtype = tuple(told["shape"]), told["dtype"]
        size = 2 * math.prod(shape) * _DTYPES[dtype].itemsize
        if packed:
            (size,) = content["packed.0"]["shape"]
        same = about["key"] == key.hex() and len(shape) == 4
        same = same and len(content) == (1 if packed else 2) * len(sums)
        # who reads on allocates, slices and books by these: no words, fractions or signs
        counts, length = (*shape, size), int(about["length"])
        same = same and all(type(count) is int and count > 0 for count in (*counts, length))
        same = same and isinstance(about["tenant"], str)
        whole = (2, *shape), dtype, size, about["tenant"], packed
        record = Record(key, length, len(sums), *whole)
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise TierFault("damaged", "the header is incomplete") from error
    if not same:
        raise TierFault("damaged", "the header is of another segment, or of none that can be")
    return RecordHeader(record, len(header), sums)


def encode_sidecar(key: SegmentKey, arrays: Mapping[str, Tensor]) -> bytes:
    """A side-car of the segment ``key``, all of it."""
    flat = {name: array.detach().cpu().contiguous() for name, array in arrays.items()}
    plain = {name: _raw(array) for name, array in flat.items()}
    described = [
        (name, dtype_name(flat[name].dtype), list(flat[name].shape), plain[name].numel())
        for name in flat
    ]
    sums = json.dumps({name: checksum(array) for name, array in plain.items()})
    header = _header(_SIDECAR, described, {"key": key.hex(), "arrays": sums})
    return b"".join([header, *(array.numpy().tobytes() for array in plain.values())])


def _raw(array: Tensor) -> Tensor:
    """The bytes of an array, which may have none: then its strides are no bytes'."""
    flat = array.reshape(-1)
    return flat.view(torch.uint8) if len(flat) else torch.empty(0, dtype=torch.uint8)


def decode_sidecar(content: bytes, key: SegmentKey) -> dict[str, Tensor]:
    """The arrays of a side-car. Raises TierFault unless it is one of ``key``, and unharmed."""
    size = header_size(content[:8])
    described, about = _decode(content[:size], _SIDECAR)
    arrays = {}
    try:
        sums = json.loads(about["arrays"])
        if about["key"] != key.hex():
            raise TierFault("damaged", "the side-car is of another segment")
        end = max([part["data_offsets"][1] for part in described.values()], default=0)
        if size + end != len(content):
            raise TierFault("damaged", "the side-car is not as long as it says")
        for name, part in described.items():
            first, stop = part["data_offsets"]
            raw = (
                torch.frombuffer(bytearray(content[size + first : size + stop]), dtype=torch.uint8)
                if stop > first
                else torch.empty(0, dtype=torch.uint8)
            )
            if checksum(raw) != sums[name]:
                raise TierFault("damaged", f"the array {name} is not what was stored")
            arrays[name] = raw.view(_DTYPES[part["dtype"]]).view(part["shape"])
    # of which a RecursionError is one
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise TierFault("damaged", "the side-car's header is incomplete") from error
    return arrays


def header_size(first: bytes) -> int:
    """How long a header is, itself included, by its first eight bytes; raises TierFault."""
    size = int.from_bytes(first, "little") + 8
    if len(first) != 8 or size > _LONGEST_HEADER:
        raise TierFault("damaged", "there is no header")
    return size


def read_header(file: int, key: SegmentKey) -> RecordHeader:
    """The header of a record's file; raises TierFault unless it is one of ``key``, and as long as
    it says."""
    size = header_size(os.pread(file, 8, 0))
    header = decode_record(os.pread(file, size, 0), key)
    if os.fstat(file).st_size != header.file_size:
        raise TierFault("damaged", "the file is not as long as it says")
    return header


def open_quietly(path: Path) -> int:
    """A file to read, whose time of last use stays what it is where the system lets its owner say
    so. Raises OSError, also for a folder, a pipe or a device."""
    try:
        file = os.open(path, _TO_READ | getattr(os, "O_NOATIME", 0))
    except PermissionError:
        file = os.open(path, _TO_READ)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "this is no regular file", str(path))
    return file


def read_tenant(path: Path, key: SegmentKey) -> str:
    """Whose record a file is; nobody's if that can't be read."""
    try:
        file = open_quietly(path)
        try:
            return read_header(file, key).record.tenant
        finally:
            os.close(file)
    except (OSError, TierFault):
        return ""


def check_file(path: Path) -> None:
    """Raise TierFault unless a file, of a record or of a side-car, is whole and as it was
    stored."""
    with os.fdopen(open_quietly(path), "rb") as file:
        content = file.read()
    name, _, ending = path.name.partition(".")
    try:
        key = SegmentKey(bytes.fromhex(name))
    except ValueError as error:
        raise TierFault("damaged", "no segment has such a name") from error
    if key.hex() != name:
        # in capitals: no tier looks for it
        raise TierFault("damaged", "no segment has such a name")
    if ending.endswith("sidecar"):
        decode_sidecar(content, key)
        return
    header = decode_record(content[: header_size(content[:8])], key)
    if len(content) != header.file_size:
        raise TierFault("damaged", "the file is not as long as it says")
    layers = torch.frombuffer(bytearray(content[header.size :]), dtype=torch.uint8)
    for layer, bytes_of in enumerate(layers.view(header.record.num_layers, -1)):
        header.check_layer(layer, bytes_of)


def write_all(file: int, content: bytes | memoryview) -> None:
    """Write all of ``content``."""
    rest = memoryview(content)
    while len(rest):
        rest = rest[os.write(file, rest) :]


def create_unfinished(path: Path) -> int:
    """A new file that is this process's own until it is closed, whoever finds it."""
    while True:
        # somebody may have emptied the folder
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o660)
        # who cleans up holds it for a moment, and then it is gone
        if not _lock(file, wait=True) or os.fstat(file).st_nlink:
            return file
        os.close(file)


def remove_abandoned(path: Path, now: float) -> None:
    """Delete an unfinished file that nobody writes to any more.

    A process number would tell little: another container has others, or the same again."""
    file = os.open(path, _TO_READ)
    try:
        mine = _lock(file, wait=False)
        if mine is None:
            mine = now - os.fstat(file).st_mtime > _ABANDONED_SECONDS
        if mine:
            path.unlink(missing_ok=True)
    finally:
        os.close(file)


def _lock(file: int, *, wait: bool) -> bool | None:
    """Whether a file could be locked; None where there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        # a file system without locks
        return None
    return True


def _header(
    kind: str, arrays: Sequence[tuple[str, str, list[int], int]], about: Mapping[str, str]
) -> bytes:
    metadata = {"format": kind, "version": VERSION, "header": _BLANK, **about}
    content: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for name, dtype, shape, size in arrays:
        content[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    signed = text.replace(_mark(_BLANK), _mark(f"{zlib.crc32(text):08x}"), 1)
    return len(text).to_bytes(8, "little") + signed


def _decode(header: bytes, kind: str) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        content = json.loads(header[8:])
        about = content.pop("__metadata__")
        told = about["header"]
        version = about["version"]
        signed = _mark(str(told))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TierFault("damaged", "the header can't be read") from error
    if about.get("format") != kind or version != VERSION:
        raise TierFault("damaged", f"this is no {kind} of version {VERSION}")
    blank = header[8:].replace(signed, _mark(_BLANK), 1)
    if f"{zlib.crc32(blank):08x}" != told:
        raise TierFault("damaged", "the header is not what was stored")
    return content, about


def _mark(told: str) -> bytes:
    return f'"header":"{told}"'.encode()

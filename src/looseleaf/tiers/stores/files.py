"""The file format of records and side-cars: safetensors with a version and checksums.

The metadata holds a CRC-32 of every array and of the header. Any safetensors reader opens the
files. Checksums detect faults, not forgery.

Record arrays are ``k.N`` and ``v.N``, K and V of layer N, ``[pages, kv_heads, page_size,
head_dim]``. Both of a layer are one run of bytes with one checksum in ``layers``. A packed record
has one byte array ``packed.N`` per layer, and the unpacked shape and dtype in its metadata."""

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
# longer headers are not of this format
_LONGEST_HEADER = 16 << 20
# age of abandoned files on file systems without locks
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
# a pipe without a writer would block its reader
_TO_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a dtype; raises ValueError if files can't hold it."""
    if dtype not in _NAMES:
        raise ValueError(f"tiers can't hold {dtype}: they hold {', '.join(_DTYPES)}")
    return _NAMES[dtype]


@dataclass(frozen=True)
class RecordHeader:
    """A decoded header: the offset of the first layer, and a checksum per layer."""

    record: Record
    size: int
    checksums: tuple[str, ...]

    @property
    def file_size(self) -> int:
        return self.size + self.record.num_bytes

    def check_layer(self, layer: int, content: UInt8[Tensor, " layer_bytes"]) -> None:
        """Raises TierFault unless ``content`` is the stored content."""
        if checksum(content) != self.checksums[layer]:
            raise TierFault("damaged", f"layer {layer} is not what was stored")


def raw(content: UInt8[Tensor, " bytes"]) -> memoryview:
    """The memory of a host tensor."""
    return content.numpy().data


def checksum(content: UInt8[Tensor, " bytes"]) -> str:
    """CRC-32 as eight hexadecimal digits."""
    return f"{zlib.crc32(raw(content)):08x}"


def encode_record(record: Record, layers: UInt8[Tensor, "layers layer_bytes"]) -> bytes:
    """The header of a record; ``layers`` follow it in the file."""
    size, (planes, *shape) = record.layer_bytes, record.layer_shape
    if record.packed:
        arrays = [(f"packed.{layer}", "U8", [size], size) for layer in range(record.num_layers)]
    else:
        arrays = [
            (f"{letter}.{layer}", record.dtype, shape, size // planes)
            for layer in range(record.num_layers)
            for letter in "kv"[:planes]
        ]
    sums = " ".join(checksum(layers[layer]) for layer in range(record.num_layers))
    about = {
        "key": record.key.hex(),
        "length": str(record.length),
        "tenant": record.tenant,
        "layers": sums,
    }
    if record.packed:
        layout = {"shape": shape, "dtype": record.dtype, "planes": planes}
        about |= {"packed": json.dumps(layout)}
    return _header(_RECORD, arrays, about)


def decode_record(header: bytes, key: SegmentKey) -> RecordHeader:
    """The record of a header. Raises TierFault unless it is a sound header of ``key`` in this
    version."""
    content, about = _decode(header, _RECORD)
    try:
        sums, packed = tuple(about["layers"].split()), "packed" in about
        layout = json.loads(about["packed"]) if packed else content["k.0"]
        shape, dtype = tuple(layout["shape"]), layout["dtype"]
        # records without the field are older than models whose keys are the values
        planes = layout.get("planes", 2) if packed else 1 + ("v.0" in content)
        size = planes * math.prod(shape) * _DTYPES[dtype].itemsize
        if packed:
            (size,) = content["packed.0"]["shape"]
        is_valid = about["key"] == key.hex() and len(shape) == 4
        is_valid = is_valid and len(content) == (1 if packed else planes) * len(sums)
        # readers allocate and slice by these counts, so they must be positive integers
        counts, length = (planes, *shape, size), int(about["length"])
        is_valid = is_valid and all(type(count) is int and count > 0 for count in (*counts, length))
        is_valid = is_valid and isinstance(about["tenant"], str)
        layer_shape, tenant = (planes, *shape), about["tenant"]
        record = Record(key, length, len(sums), layer_shape, dtype, size, tenant, packed)
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise TierFault("damaged", "the header is incomplete") from error
    if not is_valid:
        raise TierFault("damaged", "the header is of another segment, or invalid")
    return RecordHeader(record, len(header), sums)


def encode_sidecar(key: SegmentKey, arrays: Mapping[str, Tensor]) -> bytes:
    """The whole file of a side-car of ``key``."""
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
    """The bytes of an array, which may be empty."""
    flat = array.reshape(-1)
    return flat.view(torch.uint8) if len(flat) else torch.empty(0, dtype=torch.uint8)


def decode_sidecar(content: bytes, key: SegmentKey) -> dict[str, Tensor]:
    """The arrays of a side-car. Raises TierFault unless it is a sound side-car of ``key``."""
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
    # RecursionError is a RuntimeError
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise TierFault("damaged", "the side-car's header is incomplete") from error
    return arrays


def header_size(first: bytes) -> int:
    """The header's length, including its first eight bytes; raises TierFault."""
    size = int.from_bytes(first, "little") + 8
    if len(first) != 8 or size > _LONGEST_HEADER:
        raise TierFault("damaged", "there is no header")
    return size


def read_header(file: int, key: SegmentKey) -> RecordHeader:
    """The header of a record's file. Raises TierFault if it or the file size is wrong."""
    size = header_size(os.pread(file, 8, 0))
    header = decode_record(os.pread(file, size, 0), key)
    if os.fstat(file).st_size != header.file_size:
        raise TierFault("damaged", "the file is not as long as it says")
    return header


def open_quietly(path: Path) -> int:
    """Opens a regular file for reading, without updating its access time where permitted.

    Raises OSError, also for folders, pipes and devices."""
    try:
        file = os.open(path, _TO_READ | getattr(os, "O_NOATIME", 0))
    except PermissionError:
        file = os.open(path, _TO_READ)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "this is no regular file", str(path))
    return file


def read_tenant(path: Path, key: SegmentKey) -> str:
    """The tenant of a record's file, empty if it can't be read."""
    try:
        file = open_quietly(path)
        try:
            return read_header(file, key).record.tenant
        finally:
            os.close(file)
    except (OSError, TierFault):
        return ""


def check_file(path: Path) -> None:
    """Raises TierFault unless a record or side-car file is sound."""
    with os.fdopen(open_quietly(path), "rb") as file:
        content = file.read()
    name, _, ending = path.name.partition(".")
    try:
        key = SegmentKey(bytes.fromhex(name))
    except ValueError as error:
        raise TierFault("damaged", "no segment has such a name") from error
    if key.hex() != name:
        # no tier looks for a name in capitals
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
    rest = memoryview(content)
    while len(rest):
        rest = rest[os.write(file, rest) :]


def create_unfinished(path: Path) -> int:
    """A new file, locked until it is closed."""
    while True:
        # the folder may have been deleted
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o660)
        # a cleaning process locks the file and deletes it
        if not _lock(file, wait=True) or os.fstat(file).st_nlink:
            return file
        os.close(file)


def remove_abandoned(path: Path, now: float) -> None:
    """Deletes an unfinished file that no process writes.

    Locks decide, because process numbers differ between containers."""
    file = os.open(path, _TO_READ)
    try:
        is_free = _lock(file, wait=False)
        if is_free is None:
            is_free = now - os.fstat(file).st_mtime > _ABANDONED_SECONDS
        if is_free:
            path.unlink(missing_ok=True)
    finally:
        os.close(file)


def _lock(file: int, *, wait: bool) -> bool | None:
    """Whether a file could be locked; None without lock support."""
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
        digits = about["header"]
        version = about["version"]
        signed = _mark(str(digits))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TierFault("damaged", "the header can't be read") from error
    if about.get("format") != kind or version != VERSION:
        raise TierFault("damaged", f"this is no {kind} of version {VERSION}")
    blank = header[8:].replace(signed, _mark(_BLANK), 1)
    if f"{zlib.crc32(blank):08x}" != digits:
        raise TierFault("damaged", "the header is not what was stored")
    return content, about


def _mark(digits: str) -> bytes:
    return f'"header":"{digits}"'.encode()

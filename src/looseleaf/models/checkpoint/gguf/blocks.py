"""Values of a GGUF file's tensors: blocks are dequantized in slabs of rows.

The layouts of blocks are those of the ``gguf`` package, whose NumPy code dequantizes them.
"""

from collections.abc import Iterator

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from looseleaf.errors import CorruptCheckpoint, UnsupportedModel
from looseleaf.models.checkpoint.gguf.tensor_table import BlockEntry
from looseleaf.ops.dense.quantized_linear import FORMATS, BlockMatrix, beats_packed_bfloat16

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# values per slab, so the copy in fp32 stays small
_SLAB_VALUES = 1 << 22


def copy_values(entry: BlockEntry, target: Tensor, first: int = 0) -> None:
    """Copy the rows of ``entry`` from ``first`` on into ``target``, in its dtype and device.

    Rows of interleaved heads return to the order of Transformers. Raises CorruptCheckpoint for a
    file that can't be read, and UnsupportedModel for a format that can't be dequantized."""
    if not entry.heads:
        for start, values in _slabs(entry, first, first + len(target)):
            target[start - first : start - first + len(values)].copy_(values)
        return
    whole = torch.cat([values for _, values in _slabs(entry, 0, entry.shape[0])])
    # (head, pair, half) in the file, (head, half, pair) in the model
    pairs = whole.unflatten(0, (entry.heads, -1, 2)).transpose(1, 2)
    target.copy_(pairs.reshape(whole.shape)[first : first + len(target)])


def keeps_values(name: str, dtype: torch.dtype) -> bool:
    """Whether values of the 16-bit format ``name`` keep their bits under ``dtype``."""
    if name == "BF16" and dtype is torch.bfloat16:
        return beats_packed_bfloat16()
    return name in ("BF16", "F16") and dtype is torch.float32


def block_matrix(entry: BlockEntry, dtype: torch.dtype) -> BlockMatrix | None:
    """The matrix of ``entry`` in its blocks, mapped from the file, for activations in ``dtype``.

    None for a format without blocks, and for 16-bit values if `keeps_values` says no. Rows of
    interleaved heads are copied in the order of Transformers."""
    is_plain = entry.dtype in _DTYPES and not keeps_values(entry.dtype, dtype)
    if entry.dtype not in FORMATS or len(entry.shape) != 2 or entry.added or is_plain:
        return None
    content = np.memmap(entry.path, np.uint8, "c", entry.start, (entry.end - entry.start,))
    blocks = torch.from_numpy(content).view(entry.shape[0], -1)
    if entry.heads:
        # blocks lie along a row, so rows may change places
        order = torch.arange(entry.shape[0]).view(entry.heads, -1, 2).transpose(1, 2)
        blocks = blocks[order.reshape(-1)]
    return BlockMatrix(entry.dtype, blocks)


def _slabs(entry: BlockEntry, first: int, end: int) -> Iterator[tuple[int, Tensor]]:
    """The rows ``first`` to ``end`` in the file's order, as pairs of a start and values."""
    rows = entry.shape[0]
    row_bytes = (entry.end - entry.start) // rows
    step = max(1, _SLAB_VALUES // max(1, entry.shape[-1] if len(entry.shape) > 1 else 1))
    try:
        with entry.path.open("rb") as file:
            for start in range(first, end, step):
                count = min(step, end - start)
                file.seek(entry.start + start * row_bytes)
                content = np.fromfile(file, np.uint8, count * row_bytes)
                if content.nbytes < count * row_bytes:
                    raise CorruptCheckpoint(f"{entry.path} ends in {entry.name}; download it again")
                yield start, _values(entry, content, count)
    except OSError as error:
        raise CorruptCheckpoint(f"{entry.path} can't be read ({error.strerror})") from error


def _values(entry: BlockEntry, content: np.ndarray, count: int) -> Tensor:
    shape = (count, *entry.shape[1:])
    if entry.dtype in _DTYPES:
        values = torch.from_numpy(content).view(_DTYPES[entry.dtype]).view(shape)
    else:
        try:
            kind = GGMLQuantizationType[entry.dtype]
            values = torch.from_numpy(dequantize(content.reshape(count, -1), kind)).view(shape)
        except (NotImplementedError, KeyError):
            raise UnsupportedModel(
                f"{entry.path}: {entry.name} is stored as {entry.dtype}, which is not supported"
            ) from None
    return values - entry.added if entry.added else values

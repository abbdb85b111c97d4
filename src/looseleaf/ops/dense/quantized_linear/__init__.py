"""The product of rows and a matrix that stays in GGUF's blocks of 4 to 8 bits.

At few rows a product is bound by the read of its matrix, so fewer bits are faster in proportion.
The C kernels round activations to 8 bits per 32 values and sum codes in integers. The reference
dequantizes the matrix and rounds nothing.
"""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from looseleaf.errors import CorruptCheckpoint
from looseleaf.ops.dense.quantized_linear.formats import FORMATS, BlockFormat, block_format
from looseleaf.ops.dense.quantized_linear.native import PackedMatrix, beats_packed_bfloat16
from looseleaf.ops.dense.quantized_linear.reference import (
    dequantize_reference,
    quantized_linear_reference,
)
from looseleaf.ops.dispatch import Implementation, choose

__all__ = [
    "FORMATS",
    "BlockFormat",
    "BlockMatrix",
    "PackedMatrix",
    "beats_packed_bfloat16",
    "quantized_linear",
]


class BlockMatrix:
    """A matrix in GGUF's blocks: ``blocks`` is uint8 ``[features, row_bytes]``, format ``name``.

    Raises UnsupportedModel for an unknown format, and CorruptCheckpoint for rows of partial
    blocks."""

    def __init__(self, name: str, blocks: UInt8[Tensor, "features row_bytes"]) -> None:
        self.layout, self.blocks = block_format(name), blocks
        self.features, row_bytes = blocks.shape
        if row_bytes % self.layout.block_bytes:
            raise CorruptCheckpoint(
                f"rows of {row_bytes} bytes are not whole blocks of {name}, which have "
                f"{self.layout.block_bytes} bytes: the file is damaged"
            )
        self.columns = row_bytes // self.layout.block_bytes * self.layout.block

    @property
    def device(self) -> torch.device:
        """The device of the blocks."""
        return self.blocks.device

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        return self.blocks.nbytes

    def dequantize(self) -> Float[Tensor, "features columns"]:
        """The values, fp32."""
        return dequantize_reference(self.blocks, self.layout)


def quantized_linear(
    x: Float[Tensor, "rows inner"], matrix: BlockMatrix, implementation: Implementation = "auto"
) -> Float[Tensor, "rows features"]:
    """``x @ matrix.T`` in the dtype of ``x``.

    The error of the C kernels is at most half a step of the activations, 1/254 of the largest value
    of 32, times the sum of the matrix's absolute values. ``native`` packs the matrix at every call:
    repeated calls keep a `PackedMatrix`. Raises InvalidOption for an unknown ``implementation``,
    and NativeUnavailable without a C compiler."""
    if choose(implementation, x, native=True) != "native":
        return quantized_linear_reference(x, matrix.blocks, matrix.layout).to(x.dtype)
    packed = PackedMatrix(matrix.blocks, matrix.layout, x.dtype)
    return packed.multiply(x, torch.empty(len(x), matrix.features, dtype=x.dtype))

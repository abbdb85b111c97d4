"""A weight of a decoder that stays quantized, for products and for lookups of rows.

On a CPU with a C compiler GGUF's blocks are packed for the C kernels. On a GPU they are sorted into
planes, which have a kernel, as codes with scales have. Elsewhere each call dequantizes.
"""

import logging
from collections.abc import Sequence
from itertools import groupby

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from looseleaf.errors import NativeUnavailable
from looseleaf.ops.dense.plane_linear import (
    MAX_ROWS,
    PlaneMatrix,
    dequantize_planes,
    plane_linear,
    plane_summands,
    split_planes,
)
from looseleaf.ops.dense.quantized_linear import BlockMatrix, PackedMatrix
from looseleaf.ops.dense.quantized_linear.reference import dequantize_reference
from looseleaf.ops.dense.scaled_linear import (
    ScaledMatrix,
    dequantize,
    most_rows,
    scaled_linear,
    scaled_summands,
)
from looseleaf.ops.experts.mlp.mxfp4 import Mxfp4Matrix

_log = logging.getLogger(__name__)
Part = PackedMatrix | BlockMatrix | PlaneMatrix | ScaledMatrix | Mxfp4Matrix


class QuantizedWeight:
    """A matrix ``[features, columns]`` of one or several ``parts``, one below the other.

    ``dtype`` is that of activations and results, ``device`` theirs and the weight's."""

    def __init__(self, parts: Sequence[Part], dtype: torch.dtype) -> None:
        self.parts, self.dtype, self.device = tuple(parts), dtype, parts[0].device
        self.shape = torch.Size([sum(part.features for part in parts), parts[0].columns])
        # a matrix in planes has planes only
        self._planes = [part for part in parts if isinstance(part, PlaneMatrix)]

    @classmethod
    def create(
        cls, parts: Sequence[BlockMatrix], dtype: torch.dtype, *, native: bool = True
    ) -> "QuantizedWeight":
        """``parts`` one below the other; neighbours of one format become one matrix.

        With ``native``, matrices on a CPU are packed for the C kernels if there is a C compiler,
        else a warning is logged."""
        merged = _merged(parts)
        if native and merged[0].device.type == "cpu":
            try:
                return cls([PackedMatrix(p.blocks, p.layout, dtype) for p in merged], dtype)
            except NativeUnavailable as error:
                _log.warning("quantized weights are dequantized in every step: %s", error)
        return cls(merged, dtype)

    @classmethod
    def in_planes(
        cls, parts: Sequence[BlockMatrix], dtype: torch.dtype, device: torch.device
    ) -> "QuantizedWeight":
        """``parts`` one below the other, as planes on ``device``."""
        return cls([split_planes(part, device) for part in _merged(parts)], dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    def numel(self) -> int:
        """Number of weights."""
        return self.shape.numel()

    @property
    def can_gate(self) -> bool:
        """Whether `gate` can multiply by this weight: one packed matrix with whole halves."""
        part = self.parts[0]
        return len(self.parts) == 1 and isinstance(part, PackedMatrix) and part.can_gate

    def multiply(
        self,
        x: Float[Tensor, "rows columns"],
        bias: Float[Tensor, " features"] | None = None,
        residual: Float[Tensor, "rows features"] | None = None,
    ) -> Float[Tensor, "rows features"]:
        """``x @ weight.T + bias + residual``; ``bias`` is fp32."""
        first = self.parts[0]
        if isinstance(first, PlaneMatrix):
            return _added(plane_linear(x, self._planes), bias, residual)
        if len(self.parts) == 1 and isinstance(first, ScaledMatrix):
            return _added(scaled_linear(x, first), bias, residual)
        out = torch.empty(x.shape[0], self.shape[0], dtype=self.dtype, device=self.device)
        if len(self.parts) == 1:
            # calls are a large share of a small model's time on a CPU
            if isinstance(first, PackedMatrix):
                return first.multiply(x, out, bias, residual)
            return _multiply(first, x, out, bias, residual)
        start = 0
        for part in self.parts:
            rows = slice(start, start + part.features)
            added = None if bias is None else bias[rows]
            _multiply(part, x, out[:, rows], added, None if residual is None else residual[:, rows])
            start = rows.stop
        return out

    def summands(self, x: Float[Tensor, "rows columns"]) -> Tensor:
        """``x @ weight.T`` as ``[rows, features]`` or ``[parts, rows, features]``."""
        first = self.parts[0]
        if isinstance(first, PlaneMatrix) and len(x) <= MAX_ROWS:
            summands = plane_summands(x, self._planes)
        elif (
            isinstance(first, ScaledMatrix)
            and len(self.parts) == 1
            and len(x) <= most_rows(x, first)
        ):
            summands = scaled_summands(x, first)
        else:
            return self.multiply(x)
        return summands[0] if len(summands) == 1 else summands

    def gate(self, x: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows half"]:
        """``silu(x @ gate.T) * (x @ up.T)`` of a weight ``[gate, up]`` that `can_gate`."""
        part = self.parts[0]
        assert isinstance(part, PackedMatrix), "see can_gate"
        out = torch.empty(x.shape[0], self.shape[0] // 2, dtype=self.dtype)
        return part.multiply(x, out, gated=True)

    def part(self, features: slice) -> "QuantizedWeight":
        """Neighbouring features of a weight with one part, which share its memory."""
        (whole,) = self.parts
        if isinstance(whole, BlockMatrix):
            cut: Part = BlockMatrix(whole.layout.name, whole.blocks[features])
        elif isinstance(whole, PackedMatrix):
            cut = whole.part(features)
        else:
            cut = whole.rows(features)
        return QuantizedWeight([cut], self.dtype)

    def rows(self, numbers: Int[Tensor, " rows"]) -> Float[Tensor, "rows columns"]:
        """Rows by number, of a weight with one part."""
        (part,) = self.parts
        return _rows(part, numbers, self.dtype)

    def dequantize(self) -> Float[Tensor, "features columns"]:
        """All values in `dtype`."""
        rows = (torch.arange(part.features, device=self.device) for part in self.parts)
        return torch.cat([_rows(*pair, self.dtype) for pair in zip(self.parts, rows, strict=True)])


def _merged(parts: Sequence[BlockMatrix]) -> list[BlockMatrix]:
    """``parts``, with neighbours of one format as one matrix."""
    merged = []
    for name, group in groupby(parts, lambda part: part.layout.name):
        blocks = [part.blocks for part in group]
        merged.append(BlockMatrix(name, blocks[0] if len(blocks) == 1 else torch.cat(blocks)))
    return merged


def _rows(part: Part, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(part, PackedMatrix):
        return part.rows(numbers)
    if isinstance(part, PlaneMatrix):
        return dequantize_planes(part, dtype, numbers)
    if isinstance(part, ScaledMatrix):
        return dequantize(part.rows(numbers), dtype)
    if isinstance(part, Mxfp4Matrix):
        return part.rows(numbers).dequantize().to(dtype)
    return dequantize_reference(part.blocks[numbers], part.layout).to(dtype)


def _multiply(
    part: Part, x: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    if isinstance(part, PackedMatrix):
        return part.multiply(x, out, bias, residual)
    if isinstance(part, ScaledMatrix):
        return out.copy_(_added(scaled_linear(x, part), bias, residual))
    assert not isinstance(part, PlaneMatrix), "all planes are multiplied together"
    weight = (
        part.dequantize()
        if isinstance(part, Mxfp4Matrix)
        else dequantize_reference(part.blocks, part.layout)
    )
    product = functional.linear(x.float(), weight, bias)
    return out.copy_(product if residual is None else product + residual)


def _added(product: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """``product + bias + residual`` in the dtype of ``product``."""
    if bias is not None:
        product = (product + bias).to(product.dtype)
    return product if residual is None else product.add_(residual)

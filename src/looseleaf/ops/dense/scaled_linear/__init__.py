"""The product with a matrix of few bits on a GPU: codes, and a scale for each group of a row.

A weight is ``(code - zero) * scale``. Codes are FP8 (e4m3), int8, or pairs of 4 bits. A group is
some inner dims of one output, up to all of them.

Few rows are bound by the read of the matrix, so a kernel reads the codes and dequantizes them on
the way. More rows quantize their activations to FP8 where the library multiplies FP8, else they
dequantize slabs of the matrix for the library.

The forms of public checkpoints: FP8 by tensor, output or block (compressed-tensors, DeepSeek), and
4 or 8 bits by group (AWQ, arXiv 2306.00978; GPTQ, arXiv 2210.17323)."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.errors import InvalidOption
from looseleaf.ops.dense.scaled_linear.reference import (
    dequantize_reference,
    scaled_linear_reference,
)
from looseleaf.ops.dense.scaled_linear.vectors import MAX_ROWS as MAX_VECTORS
from looseleaf.ops.dispatch import Implementation, choose

Codes = Literal["fp8", "int8", "int4"]

TILE = 128
"""Inner dims of a tile. A byte of 4-bit codes has columns ``n`` (low) and ``n + TILE / 2``."""

TILE_FEATURES = 64
"""Outputs of a tile."""

MAX_ROWS = 128
"""Most rows of the kernel."""

_SLAB = 8192
_MIN_SCALE = 1e-12


@dataclass(frozen=True)
class ScaledMatrix:
    """A matrix ``[features, columns]`` of codes with scales.

    ``codes`` is e4m3 or int8 ``[features, columns]``, or uint8 ``[features, columns / 2]`` for
    pairs of 4 bits, as `pack_pairs` makes them. ``scales`` (fp32) and ``zeros`` (fp32, None for
    codes around zero) are ``[features, groups]``, with equal groups of columns."""

    kind: Codes
    codes: Tensor
    scales: Float[Tensor, "features groups"]
    zeros: Float[Tensor, "features groups"] | None = None

    @property
    def features(self) -> int:
        return self.codes.shape[0]

    @property
    def columns(self) -> int:
        return self.codes.shape[1] * (2 if self.kind == "int4" else 1)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def group(self) -> int:
        """Columns of a group."""
        return self.columns // self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.codes.nbytes + self.scales.nbytes + zeros

    def rows(self, chosen: slice | Tensor) -> "ScaledMatrix":
        """Some outputs."""
        zeros = None if self.zeros is None else self.zeros[chosen]
        return ScaledMatrix(self.kind, self.codes[chosen], self.scales[chosen], zeros)

    def to(self, device: torch.device) -> "ScaledMatrix":
        """The matrix on ``device``."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return ScaledMatrix(self.kind, self.codes.to(device), self.scales.to(device), zeros)

    def laid_out(self) -> "ScaledMatrix":
        """The matrix with the scales of neighbouring outputs side by side, which read faster."""
        scales = self.scales.t().contiguous().t()
        zeros = None if self.zeros is None else self.zeros.t().contiguous().t()
        return ScaledMatrix(self.kind, self.codes, scales, zeros)

    def same_form(self, other: "ScaledMatrix") -> bool:
        """Whether `stack` can join both."""
        first, second = ((m.kind, m.columns, m.group, m.zeros is None) for m in (self, other))
        return first == second


def stack(matrices: list[ScaledMatrix]) -> ScaledMatrix:
    """Matrices of one form, one below the other."""
    zeros = [m.zeros for m in matrices if m.zeros is not None]
    return ScaledMatrix(
        matrices[0].kind,
        torch.cat([m.codes for m in matrices]),
        torch.cat([m.scales for m in matrices]),
        torch.cat(zeros) if zeros else None,
    )


def pack_pairs(codes: Tensor) -> Tensor:
    """Codes ``[features, columns]`` from 0 to 15 as bytes ``[features, columns / 2]``.

    Raises InvalidOption unless columns are whole tiles."""
    if codes.shape[1] % TILE:
        raise InvalidOption(f"4-bit codes come in tiles of {TILE} columns, not {codes.shape[1]}")
    low, high = codes.to(torch.uint8).unflatten(1, (-1, 2, TILE // 2)).unbind(2)
    pairs: Tensor = low | high << 4
    return pairs.flatten(1)


def quantize(
    weight: Float[Tensor, "features columns"], kind: Codes, group: int = TILE
) -> ScaledMatrix:
    """``weight`` in the codes that are nearest to it.

    FP8 and int8 have one scale per output. ``int4`` has a scale and a zero per ``group`` columns.
    Raises InvalidOption if the columns don't fill whole groups."""
    wide = weight.float()
    if kind == "fp8":
        scales = (wide.abs().amax(1, keepdim=True) / 448.0).clamp_min(_MIN_SCALE)
        return ScaledMatrix(kind, (wide / scales).to(torch.float8_e4m3fn), scales)
    if kind == "int8":
        scales = (wide.abs().amax(1, keepdim=True) / 127.0).clamp_min(_MIN_SCALE)
        return ScaledMatrix(kind, (wide / scales).round().to(torch.int8), scales)
    if weight.shape[1] % group:
        raise InvalidOption(f"{weight.shape[1]} columns don't fill groups of {group}")
    grouped = wide.unflatten(1, (-1, group))
    low, high = grouped.amin(2).clamp_max(0.0), grouped.amax(2).clamp_min(0.0)
    scales = ((high - low) / 15.0).clamp_min(_MIN_SCALE)
    zeros = (-low / scales).round()
    codes = (grouped / scales[..., None] + zeros[..., None]).round().clamp(0, 15).flatten(1)
    return ScaledMatrix(kind, pack_pairs(codes), scales, zeros)


def fits(matrix: ScaledMatrix) -> bool:
    """Whether the kernel takes ``matrix``: whole tiles, and a tile within one group."""
    whole = matrix.features % TILE_FEATURES == 0 and matrix.columns % TILE == 0
    return whole and matrix.group % TILE == 0


def dequantize(matrix: ScaledMatrix, dtype: torch.dtype) -> Float[Tensor, "features columns"]:
    """All values, rounded once to ``dtype``."""
    return dequantize_reference(matrix).to(dtype)


def scaled_linear(
    x: Float[Tensor, "rows columns"],
    matrix: ScaledMatrix,
    implementation: Implementation = "auto",
) -> Float[Tensor, "rows features"]:
    """``x @ weight.T``: summed in fp32, rounded once to the dtype of ``x``. Rows are contiguous.

    On a GPU, more than four rows by FP8 codes with one scale per output are rounded to FP8, each
    row with its own scale, if the library multiplies FP8. Other products have no error beyond the
    sum's and the rounding of a dequantized weight to the dtype of ``x``. Raises InvalidOption for
    an unknown ``implementation``."""
    chosen = choose(implementation, x)
    if chosen != "triton":
        return scaled_linear_reference(x, matrix)
    from looseleaf.ops.dense.scaled_linear.kernel import quantize_rows_triton, scaled_linear_triton

    if len(x) <= most_rows(x, matrix) and fits(matrix):
        return scaled_linear_triton(x, matrix)
    if multiplies_fp8(x, matrix):
        codes, scales = quantize_rows_triton(x)
        return torch._scaled_mm(
            codes,
            matrix.codes.t(),
            scale_a=scales,
            scale_b=matrix.scales.t(),
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
    out = torch.empty(len(x), matrix.features, dtype=x.dtype, device=x.device)
    for start in range(0, matrix.features, _SLAB):
        slab = slice(start, min(start + _SLAB, matrix.features))
        out[:, slab] = x @ dequantize(matrix.rows(slab), x.dtype).t()
    return out


def most_rows(x: Tensor, matrix: ScaledMatrix) -> int:
    """Most rows for which a kernel is faster than the library."""
    return MAX_VECTORS if multiplies_fp8(x, matrix) else MAX_ROWS


def scaled_summands(
    x: Float[Tensor, "rows columns"],
    matrix: ScaledMatrix,
    implementation: Implementation = "auto",
) -> Float[Tensor, "parts rows features"]:
    """Summands of `scaled_linear`, fp32 if there are several, for the next operator to add.

    At most `most_rows`, and a matrix that `fits`. Raises InvalidOption for an unknown
    ``implementation``."""
    if choose(implementation, x) != "triton":
        return scaled_linear_reference(x, matrix)[None]
    from looseleaf.ops.dense.scaled_linear.kernel import scaled_summands_triton

    return scaled_summands_triton(x, matrix)


def multiplies_fp8(x: Tensor, matrix: ScaledMatrix) -> bool:
    """Whether the library multiplies ``x`` in FP8: one scale per output, bf16, Ada or later."""
    return (
        x.is_cuda
        and matrix.kind == "fp8"
        and matrix.scales.shape[1] == 1
        and x.dtype == torch.bfloat16
        and matrix.columns % 16 == 0
        and matrix.features % 16 == 0
        and torch.cuda.get_device_capability(x.device) >= (8, 9)
    )

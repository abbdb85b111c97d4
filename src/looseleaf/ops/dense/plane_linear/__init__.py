"""The product with a matrix in GGUF's formats of 4 to 8 bits on a GPU.

GGUF's blocks have 18 to 210 bytes, which a GPU can't read in aligned words. So the bits of a matrix
are sorted into planes: low halves of codes, their further bits, and scales. The planes take as many
bytes as the blocks; Q4_K, Q5_K and Q6_K take up to 3 % more.

Few rows are bound by the read of the matrix, so kernels read the planes. One or two rows of 16 bits
multiply codes without tensor cores, and no weight is rounded. For more rows a weight is rounded
once to the dtype of the rows. For many rows, slabs of the matrix are dequantized for the library.

A unit is 64 columns. Byte ``j`` of its 32 low bytes has the codes of columns ``j`` and ``j + 32``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from looseleaf.ops.dense.plane_linear.reference import (
    dequantize_planes_reference,
    plane_linear_reference,
)
from looseleaf.ops.dense.quantized_linear import BlockFormat, BlockMatrix
from looseleaf.ops.dense.quantized_linear.reference import block_codes, sub_codes
from looseleaf.ops.dispatch import Implementation, choose

UNIT = 64
"""Columns of a unit."""

TILE_FEATURES = 64
"""Outputs of a program."""

MAX_ROWS = 128
"""Most rows of the kernel."""

# outputs that are dequantized for the library, and codes that are sorted together
_SLAB = 8192
_SORTED_CODES = 1 << 22


@dataclass(frozen=True)
class PlaneMatrix:
    """A matrix ``[features, columns]`` in planes, of the values of a `BlockFormat`.

    ``codes`` has 32 bytes per unit, or a byte per code of 8 bits. ``high`` has the fifth and sixth
    bits: the bits of column ``c`` of a unit are in byte ``c % 8`` or ``c % 16``. ``words`` has 4
    bytes per unit: two float16 scales, four int8 scale codes (Q6_K), or two scale codes and two
    codes of minimums (Q4_K, Q5_K). ``tops`` has 4 bytes per unit with two float16 minimums, or per
    block of 256 columns with the float16 scales of both sorts of codes."""

    layout: BlockFormat
    codes: UInt8[Tensor, "features code_bytes"]
    high: UInt8[Tensor, "features high_bytes"] | None
    words: Int[Tensor, "units features"]
    tops: Int[Tensor, "tops features"] | None

    @property
    def features(self) -> int:
        return self.codes.shape[0]

    @property
    def columns(self) -> int:
        return UNIT * self.words.shape[0]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        return sum(plane.nbytes for plane in self.planes)

    @property
    def planes(self) -> list[Tensor]:
        """The planes that the format has."""
        planes = (self.codes, self.high, self.words, self.tops)
        return [plane for plane in planes if plane is not None]

    def rows(self, chosen: slice | Tensor) -> "PlaneMatrix":
        """Some outputs."""
        return PlaneMatrix(
            self.layout,
            self.codes[chosen],
            None if self.high is None else self.high[chosen],
            self.words[:, chosen],
            None if self.tops is None else self.tops[:, chosen],
        )


def fits(matrix: BlockMatrix) -> bool:
    """Whether `split_planes` and the kernel take ``matrix``: whole units and whole programs."""
    whole = matrix.features % TILE_FEATURES == 0 and matrix.columns % UNIT == 0
    return whole and matrix.layout.bits < 16 and matrix.layout.name != "MXFP4"


def split_planes(matrix: BlockMatrix, device: torch.device) -> PlaneMatrix:
    """``matrix``, for which `fits` holds, as planes on ``device``, sorted there in slabs."""
    rows = max(1, _SORTED_CODES // matrix.columns)
    whole = None
    for start in range(0, matrix.features, rows):
        blocks = matrix.blocks[start : start + rows].to(device)
        slab = _split(blocks, matrix.layout)
        whole = _empty_like(slab, matrix.features) if whole is None else whole
        target = whole.rows(slice(start, start + len(blocks)))
        for plane, source in zip(target.planes, slab.planes, strict=True):
            plane.copy_(source)
    assert whole is not None, "a matrix has features"
    return whole


def _empty_like(slab: PlaneMatrix, features: int) -> PlaneMatrix:
    """Planes without values, for more outputs."""
    codes, high, words, tops = slab.codes, slab.high, slab.words, slab.tops
    return PlaneMatrix(
        slab.layout,
        codes.new_empty(features, codes.shape[1]),
        None if high is None else high.new_empty(features, high.shape[1]),
        words.new_empty(len(words), features),
        None if tops is None else tops.new_empty(len(tops), features),
    )


def _split(blocks: Tensor, layout: BlockFormat) -> PlaneMatrix:
    rows = len(blocks)
    flat = blocks.reshape(-1, layout.block_bytes)
    codes, high = block_codes(flat, layout).view(rows, -1, UNIT), None
    if layout.bits in (5, 6):
        num_bits = layout.bits - 4
        shifts = torch.arange(0, 8, num_bits, dtype=torch.uint8, device=flat.device)[:, None]
        upper = (codes >> 4).unflatten(2, (len(shifts), -1)) << shifts
        high = upper.sum(2, dtype=torch.uint8).flatten(1)
    if layout.bits < 8:
        first, second = codes.split(UNIT // 2, 2)
        codes = first & 15 | second << 4
    words, tops = (
        None if part is None else part.contiguous().view(torch.int32).view(rows, -1).t()
        for part in _words(flat, layout)
    )
    assert words is not None, "each format has scales"
    return PlaneMatrix(layout, codes.flatten(1), high, words, tops)


def _words(flat: Tensor, layout: BlockFormat) -> tuple[Tensor, Tensor | None]:
    """The bytes of `PlaneMatrix.words` and ``tops``, in the order of blocks."""
    if layout.block == layout.sub:
        mins = flat[:, 2:4].reshape(-1, 4) if layout.has_min else None
        return flat[:, :2].reshape(-1, 4), mins
    scales, mins = sub_codes(flat, layout)
    if mins is None:
        return scales.view(torch.uint8), torch.nn.functional.pad(flat[:, 208:210], (0, 2))
    pairs = scales.unflatten(1, (-1, 2)), mins.unflatten(1, (-1, 2))
    return torch.cat(pairs, 2), flat[:, :4]


def dequantize_planes(
    matrix: PlaneMatrix,
    dtype: torch.dtype,
    chosen: slice | Int[Tensor, " rows"] | None = None,
    implementation: Implementation = "auto",
) -> Float[Tensor, "rows columns"]:
    """The values of all or some outputs, rounded once to ``dtype``.

    Raises InvalidOption for an unknown ``implementation``."""
    chosen = slice(0, matrix.features) if chosen is None else chosen
    if choose(implementation, matrix.codes) != "triton":
        return dequantize_planes_reference(matrix.rows(chosen)).to(dtype)
    from looseleaf.ops.dense.plane_linear.kernel import dequantize_planes_triton

    return dequantize_planes_triton(matrix, dtype, chosen)


def plane_linear(
    x: Float[Tensor, "rows columns"],
    matrices: Sequence[PlaneMatrix],
    implementation: Implementation = "auto",
) -> Float[Tensor, "rows features"]:
    """``x @ weight.T`` of ``matrices`` one below the other, in the dtype of ``x``.

    Sums are fp32. Its only other error is the rounding of a weight to the dtype of ``x``, which one
    or two rows of 16 bits don't have on a GPU. Their inputs are below 2**48. The columns of ``x``
    are contiguous. Raises InvalidOption for an unknown ``implementation``."""
    if choose(implementation, x) != "triton":
        return plane_linear_reference(x, matrices)
    from looseleaf.ops.dense.plane_linear.kernel import plane_linear_triton

    if len(x) <= MAX_ROWS:
        return plane_linear_triton(x, matrices)
    out = torch.empty(len(x), features_of(matrices), dtype=x.dtype, device=x.device)
    first = 0
    for matrix in matrices:
        for start in range(0, matrix.features, _SLAB):
            slab = slice(start, min(start + _SLAB, matrix.features))
            weight = dequantize_planes(matrix, x.dtype, slab, implementation)
            out[:, first + slab.start : first + slab.stop] = x @ weight.t()
        first += matrix.features
    return out


def plane_summands(
    x: Float[Tensor, "rows columns"],
    matrices: Sequence[PlaneMatrix],
    implementation: Implementation = "auto",
) -> Float[Tensor, "parts rows features"]:
    """Summands of `plane_linear` of at most `MAX_ROWS` rows, fp32 if there are several.

    Raises InvalidOption for an unknown ``implementation``."""
    if choose(implementation, x) != "triton":
        return plane_linear_reference(x, matrices)[None]
    from looseleaf.ops.dense.plane_linear.kernel import plane_summands_triton

    return plane_summands_triton(x, matrices)


def features_of(matrices: Sequence[PlaneMatrix]) -> int:
    """Outputs of all matrices."""
    return sum(matrix.features for matrix in matrices)

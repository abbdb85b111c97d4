"""Matrices of experts in MXFP4 on a GPU, in the bytes of checkpoints (OCP Microscaling 1.0)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

BLOCK = 32
"""Values with one scale."""

# the floats of 4 bits in the order of their bits
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Mxfp4Matrix:
    """A matrix ``[features, columns]``: two neighbouring codes a byte, the first in its low half.

    A value is its float of 4 bits times ``2 ** (scale - 127)``. A scale of 255 is NaN in the format
    and not supported here."""

    codes: UInt8[Tensor, "features half_columns"]
    scales: UInt8[Tensor, "features blocks"]

    @property
    def features(self) -> int:
        return self.codes.shape[0]

    @property
    def columns(self) -> int:
        return 2 * self.codes.shape[1]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def rows(self, chosen: slice | Tensor) -> "Mxfp4Matrix":
        """Some features."""
        return Mxfp4Matrix(self.codes[chosen], self.scales[chosen])

    def dequantize(self) -> Float[Tensor, "features columns"]:
        """The values, fp32."""
        table = torch.tensor([*_VALUES, *(-x for x in _VALUES)], device=self.device)
        codes = torch.stack([self.codes & 15, self.codes >> 4], -1).flatten(1)
        values = table[codes.long()].unflatten(1, (-1, BLOCK))
        ones = torch.ones_like(self.scales, dtype=torch.float32)
        powers = torch.ldexp(ones, self.scales.int() - 127)
        scaled: Tensor = values * powers[..., None]
        return scaled.flatten(1)

"""Grouped products of a few rows per expert with matrices in MXFP4, without tensor cores.

Tensor cores need operands in their own layout, and rearranging codes for so few rows takes longer
than the read of the matrix. Here each thread multiplies the codes that it has read, and no weight
is rounded. The contract is that of `looseleaf.ops.experts.mlp`, which chooses between both."""

from dataclasses import dataclass

BLOCKS = 8
"""Neighbouring blocks of 32 columns, one for each of eight lanes: 128 bytes of codes."""


@dataclass(frozen=True)
class Tile:
    """The work of a program: up to ``rows`` rows of an expert, and ``outputs`` outputs a thread.

    Inner dims have ``parts`` parts, each of two warps or more with different outputs: with one
    warp a part, the compiler loads inputs in lanes of their own."""

    rows: int
    outputs: int
    parts: int
    warps: int

    @property
    def across(self) -> int:
        """Outputs of neighbouring threads."""
        return 32 * self.warps // self.parts // BLOCKS


# (most rows per expert on average, tile)
_TILES = ((0.25, Tile(1, 4, 4, 8)), (1, Tile(2, 4, 2, 4)), (4, Tile(4, 4, 2, 4)))

MOST = tuple(most for most, _ in _TILES)
"""Most rows per expert on average for each tile."""


def few_tile(pairs: int, num_experts: int) -> Tile | None:
    """The tile for this number of pairs of a row and an expert, None for tensor cores."""
    average = pairs / num_experts
    return next((tile for most, tile in _TILES if average <= most), None)

"""The product of one or two rows with planes of codes, without tensor cores.

Tensor cores need operands in their own layout, and rearranging codes for so few rows takes longer
than the read of the matrix. Here each thread multiplies the codes that it has read. Weights are not
rounded to 16 bits. The contract is that of `looseleaf.ops.dense.plane_linear`, which chooses
between both."""

from dataclasses import dataclass

MAX_ROWS = 2
"""Most rows of the kernel."""


@dataclass(frozen=True)
class Tile:
    """The work of a program: ``outputs`` by ``units`` of 64 columns in a step of its loop.

    ``stages`` counts steps whose loads are in flight, through shared memory from 2 on. Parts of the
    inner dims are chosen for up to ``programs`` per multiprocessor."""

    outputs: int
    units: int
    warps: int
    stages: int
    programs: int


TILE = Tile(32, 8, 4, 1, 4)
"""The fastest tile for every format on an H200."""

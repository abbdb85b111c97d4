"""Rows sorted by expert, and tiles of rows that share one: the work list of grouped products.

A row counts once for each of its experts. The number of tiles has a bound that depends on shapes
only, so launches need no numbers from the device and can be captured in graphs."""

from typing import NamedTuple

from jaxtyping import Int
from torch import Tensor

from looseleaf.ops.dispatch import Implementation, choose
from looseleaf.ops.experts.group.reference import group_rows_reference


class RowGroups(NamedTuple):
    """Sorted rows and their tiles, int32.

    ``order[i]`` is the number of the pair ``row * slots + slot`` in place ``i``. Of equal experts
    the first pair is first. A tile has an expert, its first place and its end; unused tiles have
    expert -1 and are last."""

    order: Int[Tensor, " pairs"]
    tiles: Int[Tensor, "tiles 3"]


def most_tiles(pairs: int, num_experts: int, tile: int) -> int:
    """The bound of tiles of ``tile`` rows."""
    used = min(num_experts, pairs)
    # each further tile of an expert is full but for one per expert
    return used + max(0, pairs - used) // tile


def group_rows(
    experts: Int[Tensor, "rows slots"],
    num_experts: int,
    tile: int,
    implementation: Implementation = "auto",
) -> RowGroups:
    """The rows of each expert in tiles of at most ``tile``.

    Raises InvalidOption for an unknown ``implementation``."""
    if choose(implementation, experts) == "triton":
        from looseleaf.ops.experts.group.kernel import group_rows_triton

        return RowGroups(*group_rows_triton(experts, num_experts, tile))
    return RowGroups(*group_rows_reference(experts, num_experts, tile))

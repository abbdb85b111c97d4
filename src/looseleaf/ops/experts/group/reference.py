"""The definition of `looseleaf.ops.experts.group`."""

import torch
from jaxtyping import Int
from torch import Tensor


def group_rows_reference(
    experts: Int[Tensor, "rows slots"], num_experts: int, tile: int
) -> tuple[Int[Tensor, " pairs"], Int[Tensor, "tiles 3"]]:
    """A stable sort by expert, and each expert's stretch of places in tiles."""
    flat = experts.flatten().long()
    order = flat.argsort(stable=True).int()
    tiles, place = [], 0
    for expert, count in enumerate(flat.bincount(minlength=num_experts).tolist()):
        end = place + count
        tiles += [(expert, first, min(first + tile, end)) for first in range(place, end, tile)]
        place = end
    used = min(num_experts, len(flat))
    unused = used + max(0, len(flat) - used) // tile - len(tiles)
    tiles += [(-1, 0, 0)] * unused
    table = torch.tensor(tiles, dtype=torch.int32, device=experts.device)
    return order, table.reshape(-1, 3)

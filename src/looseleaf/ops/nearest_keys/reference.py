"""Nearest keys by tiles: the scores of a tile, merged with the best so far."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

# scores and keys of a tile: fit a CPU's cache, keep a GPU busy
_TILE = {"cpu": (1 << 22, 1 << 15), "cuda": (1 << 27, 1 << 17)}


class NearestKeys(NamedTuple):
    """Ids (int32, -1 after the last) and scores (fp32, -inf after the last), ``[queries, count]``,
    best first."""

    ids: Tensor
    scores: Tensor


def nearest_keys_reference(
    q: Float[Tensor, "queries head_dim"],
    keys: Float[Tensor, "keys head_dim"],
    count: int,
    bounds: Int[Tensor, " queries"] | None = None,
) -> NearestKeys:
    """See `looseleaf.ops.nearest_keys`."""
    ids = torch.full((len(q), count), -1, dtype=torch.int32, device=q.device)
    scores = torch.full((len(q), count), -torch.inf, device=q.device)
    tile_scores, most_keys = _TILE["cuda" if q.is_cuda else "cpu"]
    tile_keys = max(1, min(len(keys), most_keys))
    tile_rows = max(1, tile_scores // tile_keys)
    for row in range(0, len(q), tile_rows):
        rows = slice(row, row + tile_rows)
        for first in range(0, len(keys), tile_keys):
            tile = q[rows].float() @ keys[first : first + tile_keys].float().T
            if bounds is not None:
                position = torch.arange(first, first + tile.shape[1], device=q.device)
                tile.masked_fill_(position >= bounds[rows, None], -torch.inf)
            best = tile.topk(min(count, tile.shape[1]), dim=1)
            tile_ids = (best.indices + first).to(torch.int32)
            tile_ids.masked_fill_(best.values == -torch.inf, -1)
            merged = torch.cat((scores[rows], best.values), 1).topk(count, dim=1)
            candidates = torch.cat((ids[rows], tile_ids), 1)
            scores[rows], ids[rows] = merged.values, candidates.gather(1, merged.indices)
    return NearestKeys(ids, scores)

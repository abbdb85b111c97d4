"""Factors of a step's queries by their own positions, for models with such factors.

A query's position is the one in its sequence. So a document's stored keys need no change when the
document moves: only the queries that read it differ."""

from collections.abc import Sequence

import torch
from torch import Tensor

from looseleaf.attention.plan.chunks import PrefillChunk
from looseleaf.attention.plan.groups import DecodeRow
from looseleaf.config import QueryScaling
from looseleaf.rope import position_scales


def scales_of(scaling: QueryScaling | None, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Factors ``[rows, 1, 1]`` of queries at ``positions``; None without factors."""
    if scaling is None:
        return None
    return position_scales(scaling, positions)[:, None, None].to(dtype)


def scaled(q: Tensor, scales: Tensor | None) -> Tensor:
    """Queries times their factors."""
    return q if scales is None else q * scales


def row_positions(decode: Sequence[DecodeRow], chunks: Sequence[PrefillChunk]) -> Tensor:
    """The position of every row of a step, on the host."""
    positions = [row.position for row in decode]
    for chunk in chunks:
        positions += map(int, chunk.positions)
    return torch.tensor(positions, dtype=torch.int64)

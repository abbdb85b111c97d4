"""Lists that a test writes out by hand: one item, or the spans of one request."""

from collections.abc import Sequence

import torch
from torch import Tensor

from looseleaf.ops.partial_attention import WorkList
from looseleaf.ops.prefill_attention import SpanList
from looseleaf.types import Rotation


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def one_item(
    pages: Sequence[int],
    starts: Sequence[int],
    rows: Sequence[tuple[int, int]],
    *,
    kv_head: int = -1,
    explicit: bool = False,
) -> WorkList:
    """Rows ``(position, bound)`` that read the same pages, in one frame at 0."""
    numbers = range(len(rows))
    return WorkList(
        num_items=int32(1),
        item_page_indptr=int32(0, len(pages)),
        item_entry_indptr=int32(0, len(rows)),
        item_kv_head=int32(kv_head),
        item_explicit=int32(int(explicit)),
        page_indices=int32(*pages),
        page_positions=int32(*starts),
        entry_row=int32(*numbers),
        entry_offset=int32(*(0 for _ in rows)),
        entry_bound=int32(*(bound for _, bound in rows)),
        entry_mask=int32(*(-1 for _ in rows)),
        entry_state=int32(*numbers),
        mask_words=int32(),
        row_positions=int32(*(position for position, _ in rows)),
        row_state_indptr=int32(*numbers, len(rows)),
    )


def one_span(
    tiles: Sequence[Sequence[int]], pages: Sequence[int], length: int, *, offset: int = 0
) -> SpanList:
    """Tiles of rows at these positions, all of one request that reads one span."""
    ends = [sum(map(len, tiles[:n])) for n in range(len(tiles) + 1)]
    return SpanList(
        num_tiles=int32(len(tiles)),
        tile_row_indptr=int32(*ends),
        tile_request=int32(*(0 for _ in tiles)),
        request_span_indptr=int32(0, 1),
        span_page_indptr=int32(0, len(pages)),
        span_offset=int32(offset),
        span_length=int32(length),
        span_explicit=int32(0),
        span_mask=int32(-1),
        page_indices=int32(*pages),
        mask_words=int32(),
        row_positions=int32(*(position for tile in tiles for position in tile)),
    )


def angles(num_positions: int, head_dim: int) -> Rotation:
    """A table that turns every pair of dims, slower and slower."""
    angle = torch.arange(num_positions)[:, None] * torch.logspace(0, -3, head_dim // 2)
    return Rotation(angle.cos(), angle.sin())

"""The attention plan of one step: the work list of its decode rows and the span list of its new
rows.

Host work, once a step and shared by all layers; what comes out are plain int32 arrays for the
operators."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from looseleaf.attention.groups import DecodeRow, Entry, Groups, Item, ReadSpan, tail_items
from looseleaf.ops.partial_attention.work_list import WorkList
from looseleaf.ops.prefill_attention.span_list import SpanList

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class PrefillChunk:
    """New rows of one part of a request: their positions, rising, and the spans they may read.

    A span may hold keys behind a row's position; the causal rule hides them.
    """

    positions: Sequence[int]
    spans: tuple[ReadSpan, ...]


@dataclass(frozen=True)
class AttentionPlan:
    """Decode rows come first in the step's rows, then the rows of the prefill chunks, in order.

    ``work`` covers the first ``num_decode_rows`` rows, ``spans`` the others; either is None if it
    has none.
    """

    num_decode_rows: int
    work: WorkList | None
    spans: SpanList | None


def make_plan(
    rows: Sequence[DecodeRow],
    groups: Groups,
    chunks: Sequence[PrefillChunk],
    *,
    page_size: int,
    split_keys: int,
    tile_rows: int,
    device: torch.device,
) -> AttentionPlan:
    """Plan a step of ``rows``, grouped as ``groups`` say, and ``chunks``.

    ``split_keys`` is the longest run of keys in an item, in tokens, a multiple of the page size;
    ``tile_rows`` the most rows in a prefill tile.
    """
    work = spans = None
    if rows:
        items = [*groups.items, *tail_items(rows, groups)]
        items = [part for item in items for part in split_item(item, split_keys // page_size)]
        work = make_work_list(items, rows, page_size=page_size, device=device)
    if chunks:
        spans = make_span_list(chunks, tile_rows=tile_rows, device=device)
    return AttentionPlan(len(rows), work, spans)


def split_item(item: Item, max_pages: int) -> list[Item]:
    """``item`` cut along its keys into near-equal runs of at most ``max_pages`` pages."""
    pages = len(item.pages)
    parts = -(-pages // max_pages)
    if parts == 1:
        return [item]
    bounds = [pages * n // parts for n in range(parts + 1)]
    return [Item(item.pages[a:b], item.first_page + a, item.entries) for a, b in pairwise(bounds)]


def _int32(values: Sequence[int] | IntArray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int32)).to(device)


def _indptr(counts: Sequence[int]) -> IntArray:
    indptr = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=indptr[1:])
    return indptr


def make_work_list(
    items: Sequence[Item], rows: Sequence[DecodeRow], *, page_size: int, device: torch.device
) -> WorkList:
    """The arrays of `WorkList` for ``items``, with the states of a row side by side."""
    entries: list[Entry] = [entry for item in items for entry in item.entries]
    entry_row = np.array([e.row for e in entries], dtype=np.int32)
    row_state_indptr = _indptr(np.bincount(entry_row, minlength=len(rows)).tolist())
    # a stable sort by row puts a row's entries side by side; their ranks are the state slots
    entry_state = np.empty(len(entries), dtype=np.int32)
    entry_state[np.argsort(entry_row, kind="stable")] = np.arange(len(entries), dtype=np.int32)
    pages: list[int] = []
    for item in items:
        pages.extend(item.pages)
    counts = [len(item.pages) for item in items]
    item_page_indptr = _indptr(counts)
    starts = np.array([item.first_page for item in items], dtype=np.int32) - item_page_indptr[:-1]
    page_positions = (np.arange(len(pages), dtype=np.int32) + np.repeat(starts, counts)) * page_size
    every = np.full(len(items), -1, dtype=np.int32)
    return WorkList(
        num_items=_int32([len(items)], device),
        item_page_indptr=_int32(item_page_indptr, device),
        item_entry_indptr=_int32(_indptr([len(item.entries) for item in items]), device),
        item_kv_head=_int32(every, device),
        item_explicit=_int32(np.zeros_like(every), device),
        page_indices=_int32(pages, device),
        page_positions=_int32(page_positions, device),
        entry_row=_int32(entry_row, device),
        entry_offset=_int32([e.offset for e in entries], device),
        entry_bound=_int32([e.bound for e in entries], device),
        entry_mask=_int32(np.full(len(entries), -1, dtype=np.int32), device),
        entry_state=_int32(entry_state, device),
        mask_words=_int32([0], device),
        row_positions=_int32([row.position for row in rows], device),
        row_state_indptr=_int32(row_state_indptr, device),
    )


def make_span_list(
    chunks: Sequence[PrefillChunk], *, tile_rows: int, device: torch.device
) -> SpanList:
    """The arrays of `SpanList` for ``chunks``; each chunk is one "request" of the list."""
    spans = [span for chunk in chunks for span in chunk.spans]
    pages: list[int] = []
    for span in spans:
        pages.extend(span.pages)
    tile_counts: list[int] = []
    tile_request: list[int] = []
    for index, chunk in enumerate(chunks):
        for start in range(0, len(chunk.positions), tile_rows):
            tile_counts.append(min(tile_rows, len(chunk.positions) - start))
            tile_request.append(index)
    none = np.zeros(len(spans), dtype=np.int32)
    return SpanList(
        num_tiles=_int32([len(tile_counts)], device),
        tile_row_indptr=_int32(_indptr(tile_counts), device),
        tile_request=_int32(tile_request, device),
        request_span_indptr=_int32(_indptr([len(chunk.spans) for chunk in chunks]), device),
        span_page_indptr=_int32(_indptr([len(span.pages) for span in spans]), device),
        span_offset=_int32([span.offset for span in spans], device),
        span_length=_int32([span.length for span in spans], device),
        span_explicit=_int32(none, device),
        span_mask=_int32(none - 1, device),
        page_indices=_int32(pages, device),
        mask_words=_int32([0], device),
        row_positions=_int32([p for chunk in chunks for p in chunk.positions], device),
    )

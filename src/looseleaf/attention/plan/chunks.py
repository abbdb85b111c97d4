"""The new rows of a step, and the lists that read them: spans, or items of a work list.

Everything is numpy over whole chunks and batches: a prompt has thousands of rows and pages."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from looseleaf.attention.plan.groups import DecodeRow, Positions, ReadSpan
from looseleaf.attention.plan.host_spans import HostSpans
from looseleaf.attention.plan.lists import (
    FlatItems,
    IntArray,
    PageArray,
    indptr_of,
    int32,
    joined_masks,
    send,
)
from looseleaf.index.host.attend import HostedRead
from looseleaf.ops.prefill_attention.span_list import SpanList
from looseleaf.ops.prefill_attention.units import UnitCosts, span_units


@dataclass(frozen=True)
class PrefillChunk:
    """New rows of one placement of a request: their positions, ascending, and the spans they read.

    A span may hold keys after a row's position; the causal rule hides them. ``hosted`` segments
    precede all of the rows, outside of the pool.
    """

    positions: Positions
    spans: tuple[ReadSpan, ...]
    hosted: tuple[HostedRead, ...] = ()


def is_patched(chunks: Sequence[PrefillChunk]) -> bool:
    """Whether a span has a patch or hidden keys."""
    spans = (span for chunk in chunks for span in chunk.spans)
    return any(span.hidden is not None or span.places is not None for span in spans)


def flat_chunks(
    chunks: Sequence[PrefillChunk], first_row: int, page_size: int, page_array: PageArray = int32
) -> FlatItems:
    """The rows of chunks without patches as entries of items, one item a span, from ``first_row``
    on. A row's bound in an item is its own position."""
    assert not is_patched(chunks), "rows with a patch need a span list"
    pages, entries = [], []
    for chunk in chunks:
        rows = np.arange(first_row, first_row + len(chunk.positions), dtype=np.int32)
        first_row += len(rows)
        for span in chunk.spans:
            bounds = np.clip(int32(chunk.positions) - (span.offset - 1), 0, span.length)
            pages.append(page_array(span.pages)[: -(-int(bounds[-1]) // page_size)])
            numbers = np.array([[0], [span.offset], [0], [-1]], dtype=np.int32)
            entries.append(np.repeat(numbers, len(rows), axis=1))
            entries[-1][0], entries[-1][2] = rows, bounds
    zeros = np.zeros(len(pages), dtype=np.int32)
    return FlatItems(
        np.concatenate(pages),
        indptr_of([len(p) for p in pages]),
        zeros,
        zeros,
        np.concatenate(entries, axis=1),
        indptr_of([e.shape[1] for e in entries]),
        zeros[:0],
        zeros,
    )


def flat_tails(
    rows: Sequence[DecodeRow], starts: Sequence[int], page_array: PageArray = int32
) -> FlatItems:
    """The items of the tail pages that a row reads alone, from page ``starts`` on: one item a row,
    with at least its newest key."""
    tails = [row.tail for row in rows]
    pages = [page_array(t.pages)[start:] for t, start in zip(tails, starts, strict=True)]
    explicit = int32([tail.places is not None for tail in tails])
    masks, mask_words = joined_masks([tail.hidden for tail in tails], explicit)
    numbers = np.arange(len(rows)), [t.offset for t in tails], [t.bound for t in tails], masks
    return FlatItems(
        np.concatenate([int32([]), *pages]),
        indptr_of([len(p) for p in pages]),
        int32(starts),
        explicit,
        np.array(numbers, dtype=np.int32),
        np.arange(len(rows) + 1, dtype=np.int32),
        mask_words,
        np.zeros(len(rows), np.int32),
    )


def host_spans(
    chunks: Sequence[PrefillChunk], tile_rows: int, parts: int = 1, page_array: PageArray = int32
) -> HostSpans:
    """The arrays of a `SpanList` for ``chunks`` on the host, in ``parts`` parts: one request of
    the list a chunk."""
    spans = [span for chunk in chunks for span in chunk.spans]
    tile_counts: list[int] = []
    tile_request: list[int] = []
    for index, chunk in enumerate(chunks):
        for start in range(0, len(chunk.positions), tile_rows):
            tile_counts.append(min(tile_rows, len(chunk.positions) - start))
            tile_request.append(index)
    explicit = int32([span.places is not None for span in spans])
    masks, mask_words = joined_masks([span.hidden for span in spans], explicit)
    arrays = {
        "num_tiles": int32([len(tile_counts)]),
        "tile_row_indptr": indptr_of(tile_counts),
        "tile_request": int32(tile_request),
        "request_span_indptr": indptr_of([len(chunk.spans) for chunk in chunks]),
        "span_page_indptr": indptr_of([len(span.pages) for span in spans]),
        "span_offset": int32([span.offset for span in spans]),
        "span_length": int32([span.length for span in spans]),
        "span_explicit": explicit,
        "span_mask": int32(masks),
        "page_indices": np.concatenate([page_array(span.pages) for span in spans]),
        "mask_words": mask_words,
        "row_positions": np.concatenate([int32(chunk.positions) for chunk in chunks]),
    }
    if len(mask_words) and all(len(_patches(chunk)) <= 1 for chunk in chunks):
        arrays["row_patch_bounds"] = np.concatenate([_patch_bounds(chunk) for chunk in chunks])
    return HostSpans(arrays, parts)


def with_units(
    spans: HostSpans, num_kv_heads: int = 1, costs: UnitCosts | None = None, groups: int = 2
) -> HostSpans:
    """``spans`` with the units of its tiles, for programs of ``groups`` consumer warpgroups. With
    ``costs`` long tiles are cut."""
    units, num_states = span_units(spans.arrays, num_kv_heads, costs)
    return HostSpans({**spans.arrays, **units}, spans.parts, num_states, groups)


def make_span_list(
    chunks: Sequence[PrefillChunk], *, tile_rows: int, device: torch.device
) -> SpanList:
    """A `SpanList` for ``chunks``, which hold all rows: one request of the list a chunk."""
    spans = host_spans(chunks, tile_rows)
    return sent_spans(with_units(spans) if device.type == "cuda" else spans, device)


def sent_spans(spans: HostSpans, device: torch.device) -> SpanList:
    tensors = send(spans.arrays, device)
    return SpanList(
        **tensors,
        parts=spans.parts,
        complete=True,
        num_states=spans.num_states,
        groups=spans.groups,
        value_start=0,
    )


def _patches(chunk: PrefillChunk) -> list[IntArray]:
    """Positions of the keys in the chunk's patches."""
    return [int32(s.places) + s.offset for s in chunk.spans if s.places is not None]


def _patch_bounds(chunk: PrefillChunk) -> IntArray:
    """For each row, the number of patch slots at its position or before."""
    positions = np.concatenate([int32([]), *_patches(chunk)])
    return int32(np.searchsorted(positions, int32(chunk.positions), "right"))

"""New rows over gathered keys: one span a chunk, in the prompt's frame, over pages of its own
(`looseleaf.ops.gather_kv`).

Gathering resolves replaced and hidden keys, so its spans need neither patch nor bitmap."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from looseleaf.attention.plan.chunks import PrefillChunk, host_spans, is_patched
from looseleaf.attention.plan.cost_model import ReadBySpans
from looseleaf.attention.plan.groups import ReadSpan
from looseleaf.attention.plan.host_spans import HostSpans
from looseleaf.attention.plan.lists import IntArray, PageArray, int32
from looseleaf.ops.gather_kv import GATHERED_SIZE
from looseleaf.ops.hopper.attention import serves
from looseleaf.ops.page_dtypes import FP8
from looseleaf.types import ScoreRule

MOST_GATHERED = 65536
"""The most keys of one layer that are gathered: 256 MiB of 8 KV heads of 128 in bf16."""
Sources = tuple[IntArray, IntArray]


def reads_gathered(kv: Tensor, row_dtype: torch.dtype, rules: Sequence[ScoreRule]) -> bool:
    """Whether the kernel for rows of this dtype can read gathered keys of the pool ``kv``, in every
    layer."""
    if kv.dtype not in (row_dtype, FP8):
        return False
    pages = kv.new_empty((0, kv.shape[3], GATHERED_SIZE, kv.shape[5]), dtype=row_dtype)
    return all(serves(pages, rule, spans=True) for rule in rules)


class GatheredChunks(NamedTuple):
    """``chunks`` over the gathered pages, and the sources of their keys: ``slots`` (negative: none)
    and ``turns``, as in `looseleaf.ops.gather_kv.KeySources`."""

    chunks: list[PrefillChunk]
    slots: IntArray
    turns: IntArray

    @property
    def num_keys(self) -> int:
        return sum(span.length for chunk in self.chunks for span in chunk.spans)


def gather_chunks(
    chunks: Sequence[PrefillChunk], page_size: int, page_array: PageArray = int32
) -> GatheredChunks | None:
    """``chunks`` over gathered pages; None if a position up to a chunk's last row has no visible
    key, or several: a slot would not determine its key's position."""
    gathered: list[PrefillChunk] = []
    sources: list[Sources] = []
    first_page = 0
    for chunk in chunks:
        num_keys = int(chunk.positions[-1]) + 1
        chunk_sources = _sources(chunk, num_keys, page_size, page_array)
        if chunk_sources is None:
            return None
        sources.append(chunk_sources)
        pages = range(first_page, first_page + len(chunk_sources[0]) // GATHERED_SIZE)
        first_page = pages.stop
        span = ReadSpan(pages, 0, num_keys, 0)
        gathered.append(PrefillChunk(chunk.positions, (span,), chunk.hosted))
    slots, turns = (np.concatenate(arrays) for arrays in zip(*sources, strict=True))
    return GatheredChunks(gathered, slots, turns)


def gathered_spans(gathered: GatheredChunks, tile_rows: int) -> HostSpans:
    """The arrays of a `SpanList` for ``gathered`` on the host."""
    spans = host_spans(gathered.chunks, tile_rows)
    sources = {"source_slots": gathered.slots, "source_turns": gathered.turns}
    return HostSpans({**spans.arrays, **sources}, spans.parts)


def read_by_spans(chunks: Sequence[PrefillChunk], tile_rows: int, num_kv_heads: int) -> ReadBySpans:
    """The reads of ``chunks`` with keys in place."""
    tiles = [-(-len(chunk.positions) // tile_rows) for chunk in chunks]
    keys = [int(chunk.positions[-1]) + 1 for chunk in chunks]
    borders = [len(chunk.spans) - 1 for chunk in chunks]
    # causal rows of a prompt without gaps see half of their own keys on average
    seen = [k - len(c.positions) / 2 for k, c in zip(keys, chunks, strict=True)]
    total = max(1, sum(tiles))
    mean_keys = sum(t * s for t, s in zip(tiles, seen, strict=True)) / total
    mean_borders = sum(t * b for t, b in zip(tiles, borders, strict=True)) / total
    masked = is_patched(chunks)
    return ReadBySpans(total * num_kv_heads, mean_keys, mean_borders, sum(keys), masked)


def _sources(
    chunk: PrefillChunk, num_keys: int, page_size: int, page_array: PageArray
) -> Sources | None:
    """Slots and rotations of a chunk's keys, padded to whole pages."""
    room = -(-num_keys // GATHERED_SIZE) * GATHERED_SIZE
    slots = np.full(room, -1, dtype=np.int32)
    turns = np.zeros(room, dtype=np.int32)
    visible = 0
    for span in chunk.spans:
        if span.offset < 0:
            return None
        length = min(span.length, num_keys - span.offset)
        if span.places is not None:
            length = int(np.searchsorted(np.asarray(span.places), num_keys - span.offset))
        if length > 0:
            visible += _lay_out(span, length, (slots, turns), page_size, page_array)
    complete = visible == num_keys and slots[:num_keys].min(initial=0) >= 0
    return (slots, turns) if complete else None


def _lay_out(
    span: ReadSpan, length: int, sources: Sources, page_size: int, page_array: PageArray
) -> int:
    """Write the sources of a span's first ``length`` keys; returns how many are visible."""
    slots, turns = sources
    pages = page_array(span.pages)[: -(-length // page_size)]
    own = np.arange(page_size, dtype=np.int32)
    flat = (pages[:, None] * np.int32(page_size) + own).ravel()[:length]
    if span.places is not None:
        positions = np.asarray(span.places[:length]) + span.offset
        slots[positions], turns[positions] = flat, span.offset
        return length
    stop = span.offset + length
    if span.hidden is None:
        slots[span.offset : stop], turns[span.offset : stop] = flat, span.offset
        return length
    hidden = np.unpackbits(span.hidden.view(np.uint8), bitorder="little", count=length)
    visible = hidden == 0
    np.copyto(slots[span.offset : stop], flat, where=visible)
    np.copyto(turns[span.offset : stop], np.int32(span.offset), where=visible)
    return int(np.count_nonzero(visible))

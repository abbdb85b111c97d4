"""Prefill attention on the CPU: one dense product per request and span, merged per row.

Each span is classified once per step. It is all visible (a document before the question), ends in
the causal diagonal (the rows themselves), or needs a bias (gaps, windows, patches). Of many rows
only those that can see a key read a span. `prefill_attention_reference` defines the result."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.errors import InvalidOption
from looseleaf.ops.flash.cpu import (
    BoolArray,
    CopiedPages,
    IntArray,
    KeyBlock,
    PageLayout,
    attend_dense,
    page_memory,
    reads_in_place,
    visibility_bias,
)
from looseleaf.ops.prefill_attention.span_list import SpanList, require_room
from looseleaf.ops.rotate.cpu import Angles, AngleTable, rotate_heads
from looseleaf.types import AttnState, Rotation, ScoreRule

# up to this number of rows, calls dominate: spans are rotated and merged together
_FEW_ROWS = 128
# spans of this length that need a bias are read in blocks of rows, each up to its last visible key
_LONG_SPAN, _BLOCK_ROWS = 512, 64


@dataclass(frozen=True)
class PreparedSpan:
    """One span as read by rows ``start:stop`` of its request.

    ``causal_from`` is the first key of a causal diagonal that ends with the last row. Without a
    diagonal it is None, and the bias of ``keys`` hides keys."""

    start: int
    stop: int
    angles: Angles
    keys: KeyBlock
    causal_from: int | None


@dataclass(frozen=True)
class PreparedRequest:
    """Rows ``start:stop`` of the step and the spans with visible keys.

    ``angles`` are those of all spans together, for few rows."""

    start: int
    stop: int
    spans: tuple[PreparedSpan, ...]
    angles: Angles | None = None


def prefill_attention_cpu(
    q: Float[Tensor, "rows qo_heads head_dim"],
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    v_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    spans: SpanList,
    rotation: Rotation,
    rule: ScoreRule,
    slot_positions: Int[Tensor, "pages page_size"] | None = None,
) -> AttnState:
    """See `looseleaf.ops.prefill_attention`; prepares and runs in one call."""
    if not reads_in_place(k_pages, v_pages):
        tiles = int(spans.num_tiles[0])
        last_request = int(spans.tile_request[:tiles].max()) if tiles else -1
        run = slice(int(spans.span_page_indptr[spans.request_span_indptr[last_request + 1]]))
        copied = CopiedPages.of((k_pages, v_pages), slot_positions, spans.page_indices, run)
        k_pages, v_pages, slot_positions = copied.k_pages, copied.v_pages, copied.slot_positions
        spans = replace(spans, page_indices=copied.page_indices)
    layout, table = PageLayout.of(k_pages, q.shape[1]), AngleTable.create(rotation)
    requests = prepare_prefill(spans, layout, table, rule, slot_positions)
    return run_prefill(q, page_memory(k_pages), page_memory(v_pages), requests, rule)


def run_prefill(
    q: Float[Tensor, "rows qo_heads head_dim"],
    k_memory: Float[Tensor, "1 outer slots head_dim"],
    v_memory: Float[Tensor, "1 outer slots head_dim"],
    requests: tuple[PreparedRequest, ...],
    rule: ScoreRule,
) -> AttnState:
    """One state per row of ``q``; ``k_memory`` and ``v_memory`` are `page_memory`."""
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -torch.inf)
    memory = k_memory, v_memory
    for request in requests:
        rows = slice(request.start, request.stop)
        if request.angles is not None:
            state = _read_together(rotate_heads(q[rows], request.angles), memory, request, rule)
            out[rows], lse[rows] = state.out, state.lse
        else:
            # states of several spans are merged in fp32
            state = AttnState(torch.zeros(q[rows].shape), lse[rows])
            _read_in_turn(q[rows], memory, request, rule, state)
            out[rows] = state.out
    return AttnState(out, lse)


def _read_in_turn(
    q: Float[Tensor, "rows qo_heads head_dim"],
    memory: tuple[Tensor, Tensor],
    request: PreparedRequest,
    rule: ScoreRule,
    states: AttnState,
) -> None:
    """Writes the states of a request's rows, span by span; ``states`` are empty before."""
    num_read = 0
    for span in request.spans:
        own = slice(span.start, span.stop)
        before = AttnState(states.out[own], states.lse[own])
        merged = None if span.start >= num_read else before
        for part in _read_span(rotate_heads(q[own], span.angles), memory, span, rule):
            merged = _join(merged, part)
        if merged is not None:
            before.out.copy_(merged.out)
            before.lse.copy_(merged.lse)
        num_read = max(num_read, span.stop)


def _read_together(
    rotated: Float[Tensor, "spans rows qo_heads head_dim"],
    memory: tuple[Tensor, Tensor],
    request: PreparedRequest,
    rule: ScoreRule,
) -> AttnState:
    """The states of few rows, with one merge of all parts."""
    parts = [
        part
        for span_q, span in zip(rotated, request.spans, strict=True)
        for part in _read_span(span_q, memory, span, rule)
    ]
    lse = torch.stack([lse[0] for _, lse in parts])  # [parts, heads, rows]
    total = lse.logsumexp(0)
    # rows without keys: a finite pivot keeps their weights 0
    weight = (lse - total.masked_fill(total == -torch.inf, 0.0)).exp()
    out = (torch.stack([out[0] for out, _ in parts]) * weight[..., None]).sum(0)
    return AttnState(out.transpose(0, 1), total.transpose(0, 1))


def _read_span(
    rotated: Float[Tensor, "rows qo_heads head_dim"],
    memory: tuple[Tensor, Tensor],
    span: PreparedSpan,
    rule: ScoreRule,
) -> list[tuple[Tensor, Tensor]]:
    """The parts of a span: one, or two if keys precede a causal diagonal. ``rotated`` is in its
    frame."""
    q = rotated.transpose(0, 1)[None]  # [1, heads, rows, head_dim]
    k, v = (span.keys.read(side) for side in memory)
    split = span.causal_from
    if split is None:
        return [attend_dense(q, k, v, rule, span.keys.bias, span.keys.blind)]
    prefix = [attend_dense(q, k[:, :, :split], v[:, :, :split], rule)] if split > 0 else []
    return [
        *prefix,
        attend_dense(q, k[:, :, split:], v[:, :, split:], rule, causal=True),
    ]


def _join(state: AttnState | None, part: tuple[Tensor, Tensor]) -> AttnState:
    """Merges a part ``[1, heads, rows, ...]`` into the state of the rows."""
    out, lse = part[0][0].transpose(0, 1), part[1][0].transpose(0, 1)
    if state is None:
        return AttnState(out, lse)
    total = torch.logaddexp(state.lse, lse)
    # rows without keys so far: a finite pivot keeps both weights 0
    pivot = total.masked_fill(total == -torch.inf, 0.0)
    weighted = (state.lse - pivot).exp()[..., None] * state.out
    return AttnState(torch.addcmul(weighted, (lse - pivot).exp()[..., None], out), total)


def prepare_prefill(
    spans: SpanList,
    layout: PageLayout,
    table: AngleTable,
    rule: ScoreRule,
    slot_positions: Int[Tensor, "pages page_size"] | None = None,
) -> tuple[PreparedRequest, ...]:
    """The spans of every request over pages of ``layout``, ready for `run_prefill`."""
    tiles = int(spans.num_tiles[0])
    rows = spans.tile_row_indptr.numpy().astype(np.int64)[: tiles + 1]
    owner = spans.tile_request.numpy()[:tiles]
    span_indptr = spans.request_span_indptr.tolist()
    builder = _SpanBuilder(spans, layout, table, rule, slot_positions)
    requests = []
    # consecutive tiles of a request are one block of rows
    starts = np.flatnonzero(np.diff(owner, prepend=-1))
    for first, last in pairwise([*starts, tiles]):
        start, stop, request = int(rows[first]), int(rows[last]), int(owner[first])
        positions = builder.row_positions[start:stop]
        prepared = [
            span
            for index in range(span_indptr[request], span_indptr[request + 1])
            for span in builder.build(index, positions)
        ]
        is_short = prepared and stop - start <= _FEW_ROWS
        angles = Angles.stack([span.angles for span in prepared]) if is_short else None
        requests.append(PreparedRequest(start, stop, tuple(prepared), angles))
    return tuple(requests)


class _SpanBuilder:
    """Builds prepared spans from the arrays of a `SpanList`."""

    def __init__(
        self,
        spans: SpanList,
        layout: PageLayout,
        table: AngleTable,
        rule: ScoreRule,
        slot_positions: Tensor | None,
    ) -> None:
        self.layout, self.table, self.rule = layout, table, rule
        self.row_positions: IntArray = spans.row_positions.numpy().astype(np.int64)
        self.page_indptr = spans.span_page_indptr.tolist()
        self.offsets, self.lengths = spans.span_offset.tolist(), spans.span_length.tolist()
        self.explicit, self.masks = spans.span_explicit.tolist(), spans.span_mask.tolist()
        self.pages: IntArray = spans.page_indices.numpy().astype(np.int64)
        self.mask_words: IntArray = spans.mask_words.numpy().astype(np.int64)
        self.slot_positions = None if slot_positions is None else slot_positions.numpy()

    def build(self, span: int, positions: IntArray) -> Iterator[PreparedSpan]:
        """The span for rows at ``positions``; nothing without visible keys."""
        if len(positions) <= _FEW_ROWS or (np.diff(positions) < 0).any():
            yield from self._read_by(span, positions, 0)
            return
        start, stop = self._rows_with_keys(span, positions)
        in_blocks = self.lengths[span] >= _LONG_SPAN
        if stop > start and in_blocks and self._needs_bias(span, positions[start:stop]):
            for first in range(start, stop, _BLOCK_ROWS):
                rows = positions[first : min(first + _BLOCK_ROWS, stop)]
                yield from self._read_by(span, rows, first)
        elif stop > start:
            yield from self._read_by(span, positions[start:stop], start)

    def _rows_with_keys(self, span: int, positions: IntArray) -> tuple[int, int]:
        """The first row at or after the span's first key, and the last with a key in its window."""
        first = last = self.offsets[span]
        if self.explicit[span]:
            keys = self._key_positions(span, self._pages(span), self.lengths[span])
            keys = keys[keys >= 0]
            if not len(keys):
                return 0, 0
            first, last = first + int(keys.min()), last + int(keys.max())
        else:
            last += self.lengths[span] - 1
        start = int(np.searchsorted(positions, first))
        if not self.rule.window:
            return start, len(positions)
        return start, int(np.searchsorted(positions, last + self.rule.window))

    def _pages(self, span: int) -> IntArray:
        return self.pages[self.page_indptr[span] : self.page_indptr[span + 1]]

    def _is_plain(self, span: int) -> bool:
        """Whether keys have the positions of their slots, and only later ones are hidden."""
        has_mask = self.explicit[span] or self.masks[span] >= 0 or self.rule.window
        return not has_mask and self.rule.alibi_slopes is None

    def _needs_bias(self, span: int, positions: IntArray) -> bool:
        """Whether a span is neither all visible nor ends in the causal diagonal."""
        frame_rows = positions - self.offsets[span]
        length = min(self.lengths[span], int(frame_rows.max()) + 1)
        return not self._is_plain(span) or not (
            length <= frame_rows.min() + 1 or _is_diagonal(frame_rows, length)
        )

    def _read_by(self, span: int, positions: IntArray, start: int) -> Iterator[PreparedSpan]:
        """The span as read by rows from ``start`` on, at ``positions``."""
        offset, length = self.offsets[span], self.lengths[span]
        frame_rows = positions - offset
        if not self.explicit[span]:
            length = min(length, int(frame_rows.max()) + 1)
        if length <= 0:
            return
        pages = self._pages(span)
        require_room(span, length, len(pages) * self.layout.page_size)
        pages = pages[: -(-length // self.layout.page_size)]
        if not self._needs_bias(span, positions):
            first = int(frame_rows.min())
            split = None if length <= first + 1 else first
            yield self._prepared(start, frame_rows, pages, np.arange(length), None, split)
            return
        keys = self._key_positions(span, pages, length)
        if self.rule.window and not self.explicit[span]:
            # pages before the first row's window are not read
            first = int(frame_rows.min()) - self.rule.window + 1
            num_hidden = max(0, first) // self.layout.page_size
            pages, keys = pages[num_hidden:], keys[num_hidden * self.layout.page_size :]
        if len(keys):
            visible = self._visible(span, frame_rows, keys)
            yield self._prepared(start, frame_rows, pages, keys, visible)

    def _key_positions(self, span: int, pages: IntArray, length: int) -> IntArray:
        if not self.explicit[span]:
            return np.arange(length)
        if self.slot_positions is None:
            raise InvalidOption("a span list with explicit spans needs slot_positions")
        return self.slot_positions[pages].reshape(-1)[:length].astype(np.int64)

    def _visible(self, span: int, frame_rows: IntArray, keys: IntArray) -> BoolArray:
        visible: BoolArray = (keys >= 0) & (keys <= frame_rows[:, None])
        if self.rule.window:
            visible &= frame_rows[:, None] - keys < self.rule.window
        if self.masks[span] >= 0:
            key = np.maximum(keys, 0)
            bits = self.mask_words[self.masks[span] + key // 32] >> (key % 32)
            visible &= (bits & 1) == 0
        return visible

    def _prepared(
        self,
        start: int,
        frame_rows: IntArray,
        pages: IntArray,
        keys: IntArray,
        visible: BoolArray | None,
        causal_from: int | None = None,
    ) -> PreparedSpan:
        bias = blind = None
        if visible is not None:
            distance = (frame_rows[:, None] - keys)[None]
            bias, blind = visibility_bias(visible[None], distance, 1, self.rule)
        block = KeyBlock.create(pages[None], self.layout, len(keys), bias, blind)
        angles = self.table.at(torch.from_numpy(frame_rows).clamp_min(0))
        return PreparedSpan(start, start + len(frame_rows), angles, block, causal_from)


def _is_diagonal(frame_rows: IntArray, length: int) -> bool:
    """Whether row i sees one key more than row i - 1, and the last row all ``length`` keys."""
    in_order = bool((np.diff(frame_rows) == 1).all())
    return in_order and frame_rows[0] >= 0 and int(frame_rows[-1]) == length - 1

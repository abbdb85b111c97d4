"""The candidate pages of rows as arrays: of one row, of several rows, and on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from looseleaf.attention.plan.groups import Bitmap, join_bitmaps
from looseleaf.attention.plan.lists import IntArray, int32


class RowCandidates(NamedTuple):
    """The candidates of one row on the host.

    ``columns`` is int32 ``[3, pages]``: page, frame position of its first slot, span index within
    the row. ``spans`` has offset Δ and bound of each span, ``bitmaps`` its hidden keys. ``limits``
    has one limit a layer; ``num_other`` counts the always-read pages."""

    columns: IntArray
    spans: Sequence[tuple[int, int]]
    bitmaps: Sequence[Bitmap | None]
    limits: Sequence[int]
    num_other: int


class TableArrays(NamedTuple):
    """The candidates of several rows on the host, int32.

    ``columns`` is ``[3, rows, most]``: page, frame position of its first slot, span; the padding
    repeats the row's first candidate. Of every span: ``span_row``, ``span_offset`` (Δ),
    ``span_bound`` (keys lie at frame positions before it), ``span_mask`` (start of its bitmap in
    ``mask_words``, or -1). ``limits`` is ``[layers, rows]``; ``num_other`` counts the
    always-read pages of a row.
    """

    columns: IntArray
    num_pages: IntArray
    limits: IntArray
    num_other: IntArray
    span_row: IntArray
    span_offset: IntArray
    span_bound: IntArray
    span_mask: IntArray
    mask_words: IntArray

    @classmethod
    def of(cls, rows: Sequence[RowCandidates]) -> "TableArrays":
        """The candidates of ``rows``, side by side."""
        counts = int32([row.columns.shape[1] for row in rows])
        columns = np.zeros((3, len(rows), counts.max()), dtype=np.int32)
        num_spans = int32([len(row.spans) for row in rows])
        first_span = np.cumsum(num_spans) - num_spans
        for index, row in enumerate(rows):
            count = counts[index]
            columns[:, index, :count] = row.columns
            columns[:, index, count:] = row.columns[:, :1]
        columns[2] += first_span[:, None].astype(np.int32)
        masks, words = join_bitmaps([bitmap for row in rows for bitmap in row.bitmaps])
        offsets, bounds = np.array([s for row in rows for s in row.spans], dtype=np.int32).T
        limits = np.array([row.limits for row in rows], dtype=np.int32).T
        num_other = int32([row.num_other for row in rows])
        row_of = np.repeat(np.arange(len(rows), dtype=np.int32), num_spans)
        return cls(columns, counts, limits, num_other, row_of, offsets, bounds, int32(masks), words)


@dataclass(frozen=True, eq=False)
class CandidateTable:
    """The candidates of ``rows``: arrays on the ``host``, int64 tensors on the pool's ``device``.

    A page that seals, or other rows, need a new table. Arrays are computed at first use."""

    rows: Sequence[RowCandidates]
    device: torch.device

    @cached_property
    def host(self) -> TableArrays:
        return TableArrays.of(self.rows)

    @cached_property
    def pages(self) -> Int[Tensor, "rows most"]:
        return self._sent(self.host.columns[0])

    @cached_property
    def starts(self) -> Int[Tensor, "rows most"]:
        return self._sent(self.host.columns[1])

    @cached_property
    def spans(self) -> Int[Tensor, "rows most"]:
        return self._sent(self.host.columns[2])

    @cached_property
    def num_pages(self) -> Int[Tensor, " rows"]:
        return self._sent(self.host.num_pages)

    @cached_property
    def limits(self) -> Int[Tensor, "layers rows"]:
        return self._sent(self.host.limits)

    @cached_property
    def span_row(self) -> Int[Tensor, " spans"]:
        return self._sent(self.host.span_row)

    @cached_property
    def span_offset(self) -> Int[Tensor, " spans"]:
        return self._sent(self.host.span_offset)

    @cached_property
    def span_bound(self) -> Int[Tensor, " spans"]:
        return self._sent(self.host.span_bound)

    @cached_property
    def span_mask(self) -> Int[Tensor, " spans"]:
        return self._sent(self.host.span_mask)

    @cached_property
    def mask_words(self) -> Int[Tensor, " words"]:
        return self._sent(self.host.mask_words)

    @property
    def most_chosen(self) -> int:
        return max(max(row.limits) for row in self.rows)

    @property
    def most_spans(self) -> int:
        """The largest number of spans of a row."""
        return max(len(row.spans) for row in self.rows)

    def _sent(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.device)

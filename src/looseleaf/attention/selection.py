"""The hook by which a decoding row reads less than all: its policy, what it chooses from, its
choice.

Before every layer's attention the policy of a row is asked, for each KV head, which of the row's
*candidates* to read: pages that are full and final, in order of position. What it can't choose is
read in any case: pages of the tail that still change, and patches. A policy may also answer for a
part of the keys itself, by a state that joins the merge, and may be told what came out.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.attention.groups import DecodeRow, ReadSpan
from looseleaf.attention.lists import join_bitmaps
from looseleaf.kv.pool import PagePool
from looseleaf.kv.summaries import PageSummaries, Summary
from looseleaf.ops.rotate import rotate
from looseleaf.types import AttnState, Rotation, ScoreRule


class Choice(NamedTuple):
    """What the rows of one policy read of their candidates in one layer.

    ``ordinals[row, head, :counts[row, head]]`` are candidates of the row, rising, each once; what
    stands behind them is any number that indexes the table of candidates. ``join`` gives one state
    a row ``[rows, qo_heads, head_dim]``, of keys that are not candidates or were not chosen; it is
    called once, when the chosen pages are read. ``done`` is then called with the state of chosen
    pages and joined state together, without what is read in any case. ``looked`` is how
    many numbers of a candidate's keys, of one KV head, were looked at besides summaries.
    """

    ordinals: Int[Tensor, "rows kv_heads most_chosen"]
    counts: Int[Tensor, "rows kv_heads"]
    join: Callable[[], AttnState] | None = None
    done: Callable[[AttnState], None] | None = None
    looked: int = 0


@runtime_checkable
class PagePolicy(Protocol):
    """Chooses pages for rows. Rows whose policies are equal are asked for together, in the order in
    which they stand in the step."""

    @property
    def dense_layers(self) -> Container[int]:
        """Layers whose rows read everything, and that `choose` is not called for."""
        ...

    @property
    def summary(self) -> Summary | None:
        """What must be known of every candidate, as `Candidates.summaries` then gives it."""
        ...

    def limit(self, num_candidates: int, num_other: int) -> int:
        """The most candidates that are chosen for a KV head, of a row that reads ``num_other``
        pages in any case; where that is all of them, the row reads densely."""
        ...

    def choose(
        self, layer: int, q: Float[Tensor, "rows qo_heads head_dim"], candidates: "Candidates"
    ) -> Choice:
        """The choice of the rows of ``candidates``, whose unrotated queries are ``q``. No row has
        more than its ``limits``. The layer's own keys of this step are stored already."""
        ...


@dataclass(frozen=True)
class SelectingRow(DecodeRow):
    """A row with a policy. The first ``sealed`` pages of its tail are full and final.

    Candidates are the pages of its settled spans but patches, and those ``sealed``. ``state`` is
    the policy's own, of this row: it is only handed on. Of a ``measured`` row it is found out how
    much of the attention its choice holds, which costs a dense read.
    """

    policy: PagePolicy
    sealed: int
    state: object = None
    measured: bool = False

    @property
    def spans(self) -> list[ReadSpan]:
        """What it chooses from; spans without candidates are left out."""
        spans = [span for span in self.settled if span.length and span.places is None]
        return [*spans, self.tail] if self.sealed else spans

    @property
    def num_candidates(self) -> int:
        """How many pages it chooses from."""
        spans = [span for span in self.settled if span.length and span.places is None]
        return sum(len(span.pages) for span in spans) + self.sealed

    def num_other(self, page_size: int) -> int:
        """Pages of the tail that it reads in any case."""
        return -(-self.tail.length // page_size) - self.sealed

    @property
    def num_patches(self) -> int:
        """Pages of its patch, which it reads too."""
        return sum(len(span.pages) for span in self.settled if span.places is not None)


@dataclass(frozen=True)
class CandidateTable:
    """The candidates of some rows as tensors on the pool's device, int64; made anew when a page is
    sealed or the rows change.

    ``pages``, ``starts`` (frame position of the first slot) and ``spans`` (which span) are ``[rows,
    most]``, padded with the row's first candidate. Of every span: ``span_row``, ``span_offset``
    (Δ), ``span_bound`` (frame positions before it are keys), ``span_mask`` (where its bitmap begins
    in ``mask_words``, or -1).
    """

    pages: Int[Tensor, "rows most"]
    starts: Int[Tensor, "rows most"]
    spans: Int[Tensor, "rows most"]
    num_pages: Int[Tensor, " rows"]
    limits: Int[Tensor, " rows"]
    span_row: Int[Tensor, " spans"]
    span_offset: Int[Tensor, " spans"]
    span_bound: Int[Tensor, " spans"]
    span_mask: Int[Tensor, " spans"]
    mask_words: Int[Tensor, " words"]
    most_chosen: int
    most_spans: int


@dataclass(frozen=True)
class Candidates:
    """What the rows of one policy choose from in one step.

    ``span_positions`` says where a span's query stands in its frame. ``summaries`` are those that
    the policy asked for, None if it did not.
    """

    rows: Sequence[SelectingRow]
    table: CandidateTable
    row_positions: Int[Tensor, " rows"]
    span_positions: Int[Tensor, " spans"]
    pool: PagePool
    rotation: Rotation
    rules: Sequence[ScoreRule]
    summaries: PageSummaries | None

    @property
    def num_kv_heads(self) -> int:
        return self.pool.kv.shape[3]

    def turned(
        self, q: Float[Tensor, "rows qo_heads head_dim"]
    ) -> Float[Tensor, "spans qo_heads head_dim"]:
        """Every span's query, in the frame of the span; fp32."""
        return rotate(q[self.table.span_row].float(), self.span_positions, self.rotation)

    def everything(self) -> Choice:
        """The choice of all of them."""
        table = self.table
        ordinals = torch.arange(table.pages.shape[1], device=table.pages.device)
        rows, heads = len(table.pages), self.num_kv_heads
        counts = table.num_pages[:, None].expand(rows, heads)
        return Choice(ordinals.expand(rows, heads, -1), counts)

    def visible(self, layer: int) -> Tensor:
        """Which candidates exist and have a key in the layer's window: bool ``[rows, most]``."""
        table, window = self.table, self.rules[layer].window
        column = torch.arange(table.pages.shape[1], device=table.pages.device)
        visible = column < table.num_pages[:, None]
        if window:
            last = table.starts + self.pool.page_size - 1
            visible &= self.span_positions[table.spans] - last < window
        return visible


def make_candidates(
    rows: Sequence[SelectingRow],
    table: CandidateTable,
    pool: PagePool,
    how: tuple[Rotation, Sequence[ScoreRule]],
    summaries: PageSummaries | None,
) -> Candidates:
    """The candidates of ``rows`` where they stand now."""
    positions = torch.tensor([row.position for row in rows]).to(table.pages.device)
    span_positions = positions[table.span_row] - table.span_offset
    return Candidates(rows, table, positions, span_positions, pool, *how, summaries)


def make_table(rows: Sequence[SelectingRow], pool: PagePool) -> CandidateTable:
    """The table of ``rows``, each of which has a candidate."""
    size = pool.page_size
    most = max(row.num_candidates for row in rows)
    columns = np.zeros((3, len(rows), most), dtype=np.int64)
    of_spans: list[tuple[int, int, int]] = []
    bitmaps, counts, limits, num_spans = [], [], [], []
    for index, row in enumerate(rows):
        start = 0
        for span in row.spans:
            pages = candidate_pages(row, span)
            stop = start + len(pages)
            columns[0, index, start:stop] = pages
            columns[1, index, start:stop] = np.arange(len(pages)) * size
            columns[2, index, start:stop] = len(of_spans)
            of_spans.append((index, span.offset, span.bound))
            bitmaps.append(span.hidden)
            start = stop
        columns[:, index, start:] = columns[:, index, :1]
        counts.append(start)
        limits.append(min(start, row.policy.limit(start, row.num_other(size))))
        num_spans.append(len(row.spans))
    masks, words = join_bitmaps(bitmaps)

    def on_device(values: object) -> Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64)).to(pool.kv.device)

    row_of, offsets, bounds = zip(*of_spans, strict=True)
    return CandidateTable(
        pages=on_device(columns[0]),
        starts=on_device(columns[1]),
        spans=on_device(columns[2]),
        num_pages=on_device(counts),
        limits=on_device(limits),
        span_row=on_device(row_of),
        span_offset=on_device(offsets),
        span_bound=on_device(bounds),
        span_mask=on_device(masks),
        mask_words=on_device(words),
        most_chosen=max(limits),
        most_spans=max(num_spans),
    )


def candidate_pages(row: SelectingRow, span: ReadSpan) -> Sequence[int]:
    """The pages of one of the row's spans that are candidates."""
    return span.pages[: row.sealed] if span.pages is row.tail.pages else span.pages


def summarised(row: SelectingRow, page_size: int) -> tuple[list[int], npt.NDArray[np.int64]]:
    """The row's candidates and how many keys each of them holds."""
    pages: list[int] = []
    counts = []
    for span in row.spans:
        some = candidate_pages(row, span)
        pages += some
        left = span.length - np.arange(len(some)) * page_size
        counts.append(np.clip(left, 1, page_size))
    return pages, np.concatenate(counts) if counts else np.zeros(0, np.int64)

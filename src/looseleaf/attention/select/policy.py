"""The policy of decode rows that select pages: its declarations, its rows and their candidates.

In every layer the policy of a row selects, for each KV head, which of the row's *candidates* are
read. Candidates are full, final pages, in order of position. Unsealed pages of the tail and patches
are always read. A policy may also compute a state over part of the keys, which joins the merge, and
may receive the merged state.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from looseleaf.attention.plan.groups import DecodeRow, ReadSpan
from looseleaf.attention.plan.lists import IntArray, PageArray, int32
from looseleaf.attention.select.anchors import Anchors, choosing_layers
from looseleaf.attention.select.candidates import CandidateTable, RowCandidates
from looseleaf.kv.pool import PagePool
from looseleaf.kv.summaries import PageSummaries, Summary
from looseleaf.ops.merge_states import KeptStates
from looseleaf.ops.rotate import rotate
from looseleaf.ops.select_pages import SeenPages
from looseleaf.types import AttnState, Rotation, ScoreRule


class Choice(NamedTuple):
    """The pages that rows of one policy read of their candidates in one layer.

    ``ordinals[row, head, :counts[row, head]]`` are candidates of the row, ascending and distinct;
    the padding after them holds any valid index of the candidate table. ``join`` returns one state
    a row ``[rows, qo_heads, head_dim]``, over keys that are not candidates or were not chosen. It
    is called once, when the chosen pages are read. ``on_merged`` receives the sum of both states,
    and of the always-read pages too if ``include_rest``. ``looked`` counts the
    numbers of a candidate's keys that the choice read besides summaries, per KV head.
    """

    ordinals: Int[Tensor, "rows kv_heads most_chosen"]
    counts: Int[Tensor, "rows kv_heads"]
    join: Callable[[], AttnState] | None = None
    on_merged: Callable[[AttnState], None] | None = None
    looked: int = 0
    include_rest: bool = False


@runtime_checkable
class Worth(Protocol):
    """Scores of candidates, for policies that need more than products with page summaries. Equal
    objects give equal scores; each has its own graphs."""

    @property
    def says_how_many(self) -> bool:
        """Whether a row may read fewer pages than its limit, a number that only the device has."""
        ...

    def looked(self, page_size: int, head_dim: int) -> int:
        """Numbers of a page's keys that the score reads, per KV head."""
        ...

    def of(
        self, layer: int, q: Float[Tensor, "rows qo_heads head_dim"], candidates: "Candidates"
    ) -> Float[Tensor, "rows kv_heads most"]:
        """fp32 scores: inf for mandatory pages, -inf for excluded ones and padding. Reads no number
        back from the device, and only tensors of the candidates."""
        ...


@runtime_checkable
class KeptOutputs(Protocol):
    """State of revised outputs between steps, as a device list reads it: see `RevisionStates`.

    ``rows`` are the rows of a policy in one step, the newest of each output first."""

    @property
    def key(self) -> tuple[object, ...]:
        """Identity of the tensors; growth replaces them."""
        ...

    def make_room(self, num_pages: int) -> None:
        """Make room for ``num_pages`` pages of an output."""
        ...

    def newly_sealed(self, rows: Sequence["SelectingRow"]) -> list[int]:
        """The candidates that past rows take over, for each row."""
        ...

    def by_output(self, rows: Sequence["SelectingRow"], indices: Sequence[int]) -> IntArray:
        """The step row ``[outputs, window]`` of each output and age, -1 for none; ``indices`` are
        the step rows of ``rows``."""
        ...

    def numbers(
        self,
        rows: Sequence["SelectingRow"],
        indices: Sequence[int],
        chosen_from: IntArray,
        *,
        outputs: int,
        num_rows: int,
    ) -> dict[str, IntArray]:
        """The arrays of `of_layer` and `seen`, for ``outputs`` outputs and ``num_rows`` step rows.
        ``chosen_from`` is the first chosen state of each step row."""
        ...

    def of_layer(self, layer: int, arrays: Mapping[str, Tensor]) -> KeptStates:
        """The states that the merge of ``layer`` continues and keeps."""
        ...

    def seen(self, layer: int, arrays: Mapping[str, Tensor], page_seen: Tensor) -> SeenPages:
        """The seen-sets of ``layer``; ``page_seen`` receives those of the chosen pages."""
        ...


class PagePolicy:
    """Chooses pages for rows. Rows with equal policies share a call, in the order of the step.

    The base declares no needs. A policy overrides the declarations that differ, and `limit` and
    `choose`."""

    @property
    def dense_layers(self) -> Container[int]:
        """Layers whose rows read all pages; `choose` is not called in them."""
        return ()

    @property
    def anchors(self) -> Anchors:
        """Layers whose choice serves the layers after them; None if every layer chooses. Such a
        choice has pages only, no ``join`` and no ``on_merged``."""
        return None

    @property
    def summary(self) -> Summary | None:
        """The summary of each candidate that the policy needs, for `Candidates.summaries`."""
        return None

    @property
    def listed_budget(self) -> tuple[int, int] | None:
        """Sink and recent pages, if a device list selects the top pages; None if it cannot."""
        return None

    @property
    def worth(self) -> Worth | None:
        """The scores of a device list; None for the largest products of query heads and
        summaries."""
        return None

    @property
    def kept(self) -> KeptOutputs | None:
        """States of revised rows, whose ``state`` is a `RevisedRow`; None without revision."""
        return None

    @property
    def counts_on_device(self) -> bool:
        """Whether only the device has the number of pages that are read."""
        return self.worth is not None and self.worth.says_how_many

    def num_leading(self, rows: Sequence["SelectingRow"]) -> int:
        """The number of first rows that choose for all; all rows have the same candidates then."""
        return len(rows)

    def limit(self, num_candidates: int, num_other: int) -> int:
        """The most candidates of a KV head that a row chooses, on average over layers.

        The row always reads ``num_other`` further pages. A row whose limit covers all candidates
        reads densely."""
        raise NotImplementedError

    def layer_limits(self, num_candidates: int, num_other: int, num_layers: int) -> Sequence[int]:
        """The limit of each layer, at least one; values of dense layers are ignored."""
        return [max(1, self.limit(num_candidates, num_other))] * num_layers

    def choose(
        self, layer: int, q: Float[Tensor, "rows qo_heads head_dim"], candidates: "Candidates"
    ) -> Choice:
        """The choice of the rows of ``candidates``, whose unrotated queries are ``q``. The counts
        are within the ``limits`` of the layer. The step's own keys are stored already."""
        raise NotImplementedError


@dataclass(frozen=True)
class RevisedRow:
    """State of a row: its output's slot, the index of its cached state in the slot, and its age, 0
    for the newest. Past rows take over the last ``newly_sealed`` candidates.
    """

    slot: int
    place: int
    age: int
    newly_sealed: int = 0


@dataclass(frozen=True)
class SelectingRow(DecodeRow):
    """A row with a policy. The first ``sealed`` pages of its tail are full and final.

    Candidates are the pages of its settled spans except patches, and the ``sealed`` pages.
    ``state`` is set under revision. For a ``measured`` row the step computes the recall of its
    choice, which costs a dense read. A row without ``rest`` skips unsealed pages and its patch in
    layers where it chooses, since an earlier step has read them.
    """

    policy: PagePolicy
    sealed: int
    state: RevisedRow | None = None
    measured: bool = False
    rest: bool = True

    @property
    def replays(self) -> bool:
        """Whether the device can fill the work list of the row."""
        return self.policy.listed_budget is not None and not self.measured

    @property
    def spans(self) -> list[ReadSpan]:
        """The spans with candidates."""
        spans = [span for span in self.settled if span.length and span.places is None]
        return [*spans, self.tail] if self.sealed else spans

    @property
    def num_candidates(self) -> int:
        """The number of candidate pages."""
        spans = [span for span in self.settled if span.length and span.places is None]
        return sum(len(span.pages) for span in spans) + self.sealed

    def num_other(self, page_size: int) -> int:
        """Pages of the tail that the row always reads."""
        return -(-self.tail.length // page_size) - self.sealed

    @property
    def num_patches(self) -> int:
        """Pages of its patch, which are always read too."""
        return sum(len(span.pages) for span in self.settled if span.places is not None)


def policy_of(row: DecodeRow) -> PagePolicy | None:
    """The policy of a row; None if it reads all its keys."""
    return row.policy if isinstance(row, SelectingRow) else None


@dataclass(frozen=True, eq=False)
class Candidates:
    """The candidates of the rows of one policy in one step.

    ``table_of`` returns the table of given rows, cached. ``summaries`` is None for policies without
    a summary."""

    rows: Sequence[SelectingRow]
    policy: PagePolicy
    table_of: Callable[[Sequence[SelectingRow]], CandidateTable]
    pool: PagePool
    rotations: Sequence[Rotation]
    rules: Sequence[ScoreRule]
    summaries: PageSummaries | None

    @cached_property
    def table(self) -> CandidateTable:
        """The table of all rows."""
        return self.table_of(self.rows)

    @cached_property
    def leading(self) -> CandidateTable:
        """The table of the rows that choose: all, or the first ones."""
        count = self.policy.num_leading(self.rows)
        return self.table if count == len(self.rows) else self.table_of(self.rows[:count])

    @property
    def num_kv_heads(self) -> int:
        return self.pool.kv.shape[3]

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """For each layer the layer whose choice it reads."""
        return choosing_layers(self.policy.anchors, self.policy.dense_layers, self.rules)

    @cached_property
    def row_positions(self) -> Int[Tensor, " rows"]:
        return torch.tensor([row.position for row in self.rows]).to(self.pool.kv.device)

    @cached_property
    def span_positions(self) -> Int[Tensor, " spans"]:
        """The frame position of each span's query."""
        return self.row_positions[self.table.span_row] - self.table.span_offset

    def first(self, count: int) -> "Candidates":
        """The candidates of the first ``count`` rows."""
        return replace(self, rows=self.rows[:count])

    def rotated(
        self, layer: int, q: Float[Tensor, "rows qo_heads head_dim"]
    ) -> Float[Tensor, "spans qo_heads head_dim"]:
        """The query of every span in a layer, rotated to the span's frame; fp32."""
        return rotate(q[self.table.span_row].float(), self.span_positions, self.rotations[layer])

    def forced(self, sink: int, recent: int) -> Bool[Tensor, "rows most"]:
        """Mask of the ``sink`` first candidates and of the last ones within ``recent`` pages, which
        count the always-read tail."""
        table = self.table
        column = torch.arange(table.pages.shape[1], device=table.pages.device)
        num_other = torch.tensor([row.num_other(self.pool.page_size) for row in self.rows])
        last = table.num_pages - (recent - num_other.to(column.device)).clamp_min(0)
        return (column < sink) | ((column >= last[:, None]) & (column < table.num_pages[:, None]))

    def everything(self) -> Choice:
        """The choice of all candidates."""
        table = self.table
        ordinals = torch.arange(table.pages.shape[1], device=table.pages.device)
        rows, heads = len(table.pages), self.num_kv_heads
        counts = table.num_pages[:, None].expand(rows, heads)
        return Choice(ordinals.expand(rows, heads, -1), counts)

    def visible(self, layer: int) -> Tensor:
        """Mask ``[rows, most]`` of candidates with a key in the layer's window."""
        table, window = self.table, self.rules[layer].window
        column = torch.arange(table.pages.shape[1], device=table.pages.device)
        visible = column < table.num_pages[:, None]
        if window:
            last = table.starts + self.pool.page_size - 1
            visible &= self.span_positions[table.spans] - last < window
        return visible


def row_candidates(
    row: SelectingRow, page_size: int, num_layers: int, array_of: PageArray
) -> RowCandidates:
    """The candidates of a row that has at least one."""
    pages = [candidate_pages(row, span, array_of) for span in row.spans]
    counts = [len(pages_of_span) for pages_of_span in pages]
    starts = np.concatenate([np.arange(count) * page_size for count in counts])
    columns = np.stack([np.concatenate(pages), starts, np.repeat(np.arange(len(pages)), counts)])
    num_other, count = row.num_other(page_size), sum(counts)
    return RowCandidates(
        columns.astype(np.int32),
        [(span.offset, span.bound) for span in row.spans],
        [span.hidden for span in row.spans],
        row.policy.layer_limits(count, num_other, num_layers),
        num_other,
    )


def candidate_pages(row: SelectingRow, span: ReadSpan, array_of: PageArray) -> IntArray:
    """The candidate pages of one span of the row."""
    pages = array_of(span.pages)
    return pages[: row.sealed] if span.pages is row.tail.pages else pages


def page_key_counts(
    row: SelectingRow, page_size: int, array_of: PageArray
) -> tuple[IntArray, npt.NDArray[np.int64]]:
    """The candidates of a row and the number of keys in each."""
    pages, counts = [], []
    for span in row.spans:
        pages.append(candidate_pages(row, span, array_of))
        remaining = span.length - np.arange(len(pages[-1])) * page_size
        counts.append(np.clip(remaining, 1, page_size))
    if not pages:
        return int32([]), np.zeros(0, np.int64)
    return np.concatenate(pages), np.concatenate(counts)

"""The reads of a step, layer by layer: all rows densely, or some rows over chosen pages.

Policies have dense layers, so a step of choosing rows has few distinct reads, each shared by
several layers. The work list always covers the pages that rows read in any case. Chosen pages join
as one more state.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from looseleaf.attention.plan.groups import DecodeRow, Entry, Groups, Item
from looseleaf.attention.plan.lists import PageArray
from looseleaf.attention.select.attend_pages import SelectedRows
from looseleaf.attention.select.candidates import CandidateTable, RowCandidates
from looseleaf.attention.select.policy import (
    Candidates,
    PagePolicy,
    SelectingRow,
    page_key_counts,
    row_candidates,
)
from looseleaf.index.host.attend import HostedAttention, HostedRead
from looseleaf.index.host.cpu_windows import HostedWindows, WindowedRows
from looseleaf.kv.pool import PagePool
from looseleaf.kv.summaries import PageSummaries
from looseleaf.types import AttnState, Rotation, ScoreRule

# first page of a row's joined state: after all others of the row
_LAST = 1 << 20
# policy sets whose rows are cached between steps
_MOST_KNOWN = 8
Grouping = Callable[[Sequence[DecodeRow]], Groups]


@dataclass(eq=False)
class HostedRows:
    """The rows of one step, by index, that read host-resident segments."""

    rows: Tensor
    positions: Sequence[int]
    reads: Sequence[tuple[HostedRead, ...]]
    attention: HostedAttention
    rules: Sequence[ScoreRule]
    _pending: "Future[AttnState] | None" = None

    def begin(self, layer: int, q: Tensor) -> None:
        """Start the reads of ``layer`` on another thread, concurrent with the pool's."""
        decode, rule = self.attention.decode, self.rules[layer]
        self._pending = self.attention.submit(
            decode, layer, q[self.rows], self.positions, self.reads, rule
        )

    def join(self, layer: int, q: Tensor, states: AttnState, row_state_indptr: Tensor) -> None:
        """Write the result as the last of the rows' ``states``."""
        assert self._pending is not None, "join needs a begun read"
        state, self._pending = self._pending.result(), None
        last_state = row_state_indptr[self.rows + 1].long() - 1
        states.out[last_state] = state.out
        states.lse[last_state] = state.lse


Joining = SelectedRows | HostedRows | WindowedRows
"""Rows of a step whose states get one more, by `begin`, then `join`."""


@dataclass(frozen=True)
class LayerReads:
    """The reads of a layer: rows as the work list has them, and the rows with joined states.

    ``key`` marks the choosing rows of the step, and the window of a layer where layers share
    choices; it is empty if none chooses. ``selected`` are these rows by policy, ``joining`` all
    rows with joined states. With ``together`` the work list of an anchor layer serves the layers
    that read its choice.
    """

    key: tuple[bool, ...]
    rows: Sequence[DecodeRow]
    groups: Groups
    selected: tuple[SelectedRows, ...] = ()
    joining: tuple[Joining, ...] = ()
    together: bool = True

    @property
    def listed(self) -> SelectedRows | None:
        """The choosing rows, if all have one policy that selects on the device; None otherwise."""
        if not self.selected or len(self.joining) != 1 or not self.together:
            return None
        [rows] = self.selected
        return rows if all(row.replays for row in rows.candidates.rows) else None


class StepReads(NamedTuple):
    """The reads of a step's decode rows: the groups of its first layer, and the choosing rows by
    policy. The groups are the same object while the rows stay the same."""

    groups: Groups
    selected: Sequence[SelectedRows] = ()


_RowKey = tuple[PagePolicy, int, int, int, int]


class _KnownRow(NamedTuple):
    """A row's candidates, and the lists that identify the row and live as long."""

    names: tuple[object, object]
    candidates: RowCandidates


class _PlainRows(NamedTuple):
    """The groups of rows that read densely, and the lists that identify the rows: settled spans
    and the tail's pages of each."""

    names: list[object]
    groups: Groups


@dataclass(eq=False)
class _Kept:
    """Cache entries that are valid while the rows stay the same."""

    groups: dict[tuple[bool, ...], tuple[list[object], Groups]] = field(default_factory=dict)
    tables: dict[tuple[PagePolicy, int], CandidateTable] = field(default_factory=dict)
    # row candidates of the previous step and of this one
    rows: dict[_RowKey, _KnownRow] = field(default_factory=dict)
    rows_now: dict[_RowKey, _KnownRow] = field(default_factory=dict)


@dataclass(eq=False)
class StepReadsBuilder:
    """Builds the reads of steps; groups, tables and summaries are cached per set of policies, since
    microbatches of a step may alternate.

    Reads of host-resident segments join the states where ``hosted`` is set, and ``windows`` for
    rows of windows; on a GPU the merge takes them instead."""

    pool: PagePool
    rotations: Sequence[Rotation]
    rules: Sequence[ScoreRule]
    group: Grouping
    array_of: PageArray
    hosted: HostedAttention | None = None
    windows: HostedWindows | None = None
    _plain: _PlainRows = field(default_factory=lambda: _PlainRows([], Groups([], [])))
    _kept: _Kept = field(default_factory=_Kept)
    _known: dict[frozenset[PagePolicy], _Kept] = field(default_factory=dict)
    _summaries: dict[str, PageSummaries] = field(default_factory=dict)

    def of(self, rows: Sequence[DecodeRow]) -> tuple[list[LayerReads], StepReads]:
        """The reads of every layer, and of the step; layers with equal reads share an object."""
        groups = self._plain_groups(rows)
        if groups is not None:
            return [LayerReads((), rows, groups)] * len(self.rules), StepReads(groups)
        selecting = {i: row for i, row in enumerate(rows) if isinstance(row, SelectingRow)}
        host_reads = self._hosted(rows)
        self._activate(frozenset(row.policy for row in selecting.values()))
        if not selecting:
            layer_reads = LayerReads((), rows, self._grouped((), rows, rows), (), host_reads)
            return [layer_reads] * len(self.rules), StepReads(layer_reads.groups)
        selected = self._selected(selecting)
        by_key: dict[tuple[bool, ...], LayerReads] = {}
        by_layer = []
        windows = sorted({rule.window for rule in self.rules})
        for layer in range(len(self.rules)):
            choosing = {i for i, row in selecting.items() if layer not in row.policy.dense_layers}
            key = tuple(i in choosing for i in range(len(rows))) if choosing else ()
            if any(selecting[i].policy.anchors is not None for i in choosing):
                # a list holds one choice, which serves layers with one window
                key += tuple(self.rules[layer].window == window for window in windows)
            if key not in by_key:
                parts = tuple(s for s in selected if layer not in s.policy.dense_layers)
                size = self.pool.page_size
                rest_rows = [
                    _rest_of(selecting[i], size) if i in choosing else r for i, r in enumerate(rows)
                ]
                groups = self._grouped(key, rows, rest_rows)
                by_key[key] = LayerReads(key, rest_rows, groups, parts, parts + host_reads)
            by_layer.append(by_key[key])
        by_layer = _with_shared_choices(by_layer)
        groups_by_key = self._kept.groups
        self._kept.groups = {key: groups for key, groups in groups_by_key.items() if key in by_key}
        return by_layer, StepReads(by_layer[0].groups, selected)

    def _plain_groups(self, rows: Sequence[DecodeRow]) -> Groups | None:
        """The groups of rows that read all their keys from the pool, None if a row does not."""
        known, names = self._plain.names, list[object]()
        same = 2 * len(rows) == len(known)
        for n, row in enumerate(rows):
            if row.hosted or isinstance(row, SelectingRow):
                return None
            pages = row.tail.pages
            names += [row.settled, pages]
            same = same and known[2 * n] is row.settled and known[2 * n + 1] is pages
        if not same:
            self._plain = _PlainRows(names, self.group(rows))
        return self._plain.groups

    def _activate(self, policies: frozenset[PagePolicy]) -> None:
        """Activate the cache of this set of policies."""
        self._kept = self._known.pop(policies) if policies in self._known else _Kept()
        self._known[policies] = self._kept
        if len(self._known) > _MOST_KNOWN:
            self._known.pop(next(iter(self._known)))

    def summaries(self, policy: PagePolicy) -> PageSummaries | None:
        """The page summaries for ``policy``; memory is allocated at first use."""
        summary = policy.summary
        if summary is None:
            return None
        if summary.name not in self._summaries:
            self._summaries[summary.name] = PageSummaries(self.pool, summary)
        return self._summaries[summary.name]

    def _hosted(self, rows: Sequence[DecodeRow]) -> tuple[Joining, ...]:
        readers = [index for index, row in enumerate(rows) if row.hosted]
        if not readers or self.hosted is None:
            return ()
        joining: list[Joining] = []
        alone = [n for n in readers if rows[n].window is None]
        if alone:
            positions, reads = zip(
                *((rows[n].position, rows[n].hosted) for n in alone), strict=True
            )
            rows_alone = torch.tensor(alone)
            joining.append(HostedRows(rows_alone, positions, reads, self.hosted, self.rules))
        inside = [(n, window) for n in readers if (window := rows[n].window) is not None]
        if inside:
            assert self.windows is not None, "windows of host-resident reads need their buffers"
            windows = [window for _, window in inside]
            positions, reads = zip(
                *((rows[n].position, rows[n].hosted) for n, _ in inside), strict=True
            )
            work = self.windows.load(positions, reads, windows)
            joining.append(WindowedRows(torch.tensor([n for n, _ in inside]), self.windows, work))
        return tuple(joining)

    def _selected(self, selecting: dict[int, SelectingRow]) -> list[SelectedRows]:
        by_policy: dict[PagePolicy, list[int]] = {}
        for index, row in selecting.items():
            by_policy.setdefault(row.policy, []).append(index)
        self._kept.rows, self._kept.rows_now = self._kept.rows_now, {}
        selected = []
        for policy, indices in by_policy.items():
            rows = [selecting[index] for index in indices]
            candidates = Candidates(
                rows,
                policy,
                partial(self._table, policy),
                self.pool,
                self.rotations,
                self.rules,
                self.summaries(policy),
            )
            # summaries are written here, before the first layer
            _ = candidates.leading
            selected.append(SelectedRows(policy, indices, candidates, len(self.rules)))
        return selected

    def _table(self, policy: PagePolicy, rows: Sequence[SelectingRow]) -> CandidateTable:
        """The candidate table of ``rows``: the same object while it is valid; unchanged rows keep
        their parts."""
        parts, new = [], []
        for row in rows:
            num_other = row.num_other(self.pool.page_size)
            key = policy, id(row.settled), id(row.tail.pages), row.sealed, num_other
            known = self._kept.rows_now.get(key) or self._kept.rows.get(key)
            if known is None:
                part = row_candidates(row, self.pool.page_size, len(self.rules), self.array_of)
                known = _KnownRow((row.settled, row.tail.pages), part)
                new.append(row)
            self._kept.rows_now[key] = known
            parts.append(known.candidates)
        self._summarise(policy, new)
        kept = self._kept.tables.get((policy, len(parts)))
        if kept is None or any(old is not new for old, new in zip(kept.rows, parts, strict=True)):
            kept = CandidateTable(parts, self.pool.kv.device)
            self._kept.tables[policy, len(parts)] = kept
        return kept

    def _summarise(self, policy: PagePolicy, rows: Sequence[SelectingRow]) -> None:
        """Write the missing summaries of the candidates of ``rows``."""
        summaries = self.summaries(policy)
        if summaries is None or not rows:
            return
        columns_of_rows = [page_key_counts(row, self.pool.page_size, self.array_of) for row in rows]
        pages, counts = (np.concatenate(columns) for columns in zip(*columns_of_rows, strict=True))
        # rows of one document share its pages
        pages, first = np.unique(pages, return_index=True)
        summaries.write(pages, counts[first])

    def _grouped(
        self, key: tuple[bool, ...], rows: Sequence[DecodeRow], rest_rows: Sequence[DecodeRow]
    ) -> Groups:
        # the lists identify a row; settled spans alone do not, since empty ones are one object
        choosing = {
            i: row
            for i, row in enumerate(rows)
            if any(key[i : i + 1]) and isinstance(row, SelectingRow)
        }
        names: list[object] = []
        for index, row in enumerate(rows):
            sealed = choosing[index].sealed if index in choosing else -1
            names += [row.settled, row.tail.pages, sealed]
        kept = self._kept.groups.get(key)
        if kept is None or not _same(kept[0], names):
            groups = self.group(rest_rows)
            for index, row in choosing.items():
                groups.tail_starts[index] = row.sealed
                entry = Entry(index, row.position, 0)
                groups.items.append(Item([], _LAST, [entry]))
            for index, row in enumerate(rows):
                if row.hosted and self.hosted is not None:
                    assert index not in choosing, "a row either chooses pages or reads by an index"
                    groups.items.append(Item([], _LAST, [Entry(index, row.position, 0)]))
            kept = names, groups
            self._kept.groups = {**self._kept.groups, key: kept} if key else {key: kept}
        return kept[1]


def _with_shared_choices(by_layer: list[LayerReads]) -> list[LayerReads]:
    """``by_layer``, where choices join as states if a choice serves a layer with other reads."""
    apart = any(
        by_layer[source].key != reads.key
        for layer, reads in enumerate(by_layer)
        for rows in reads.selected
        if (source := rows.candidates.sources[layer]) != layer
    )
    if not apart:
        return by_layer
    joined = {reads.key: replace(reads, together=False) for reads in by_layer}
    return [joined[reads.key] for reads in by_layer]


def _rest_of(row: SelectingRow, page_size: int) -> DecodeRow:
    """A choosing row without its candidates; `Groups.tail_starts`, or the length of its tail, says
    which tail pages it leaves out."""
    if not row.rest:
        tail = replace(row.tail, sharable=0, length=row.sealed * page_size)
        return DecodeRow(row.position, (), tail)
    patches = tuple(span for span in row.settled if span.places is not None)
    return DecodeRow(row.position, patches, replace(row.tail, sharable=0))


def _same(kept: Sequence[object], names: Sequence[object]) -> bool:
    return len(kept) == len(names) and all(
        old is new or (isinstance(new, int) and old == new)
        for old, new in zip(kept, names, strict=True)
    )

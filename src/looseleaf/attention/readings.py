"""How the rows of a step read, layer by layer: all of them densely, or some by choice.

Policies have dense layers, so a step of selecting rows has a few ways of reading, each shared by
some layers. In every one of them the work list covers what rows read in any case; what they choose
joins as one more state.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from looseleaf.attention.groups import DecodeRow, Entry, Groups, Item
from looseleaf.attention.hosted import HostedAttention, HostedRead, merge_all
from looseleaf.attention.hosted_windows import HostedWindows, WindowedRows
from looseleaf.attention.lists import PageArray
from looseleaf.attention.selected import attend_chosen
from looseleaf.attention.selection import (
    Candidates,
    CandidateTable,
    PagePolicy,
    RowCandidates,
    SelectingRow,
    row_candidates,
    summarised,
)
from looseleaf.kv.pool import PagePool
from looseleaf.kv.summaries import PageSummaries
from looseleaf.types import AttnState, Rotation, ScoreRule

# where the place of a row's joined state stands among its others: behind them all
_LAST = 1 << 20
# sets of policies whose rows are known from step to step
_MOST_KNOWN = 8
Grouping = Callable[[Sequence[DecodeRow]], Groups]


class RowReads(NamedTuple):
    """What one row read in a step, summed over layers and KV heads: pages, of how many, and what it
    looked at to choose them; and the share of the attention that they held, if measured."""

    pages: int
    of_pages: int
    looked_bytes: int
    recall: float | None


@dataclass(frozen=True)
class SelectedRows:
    """The rows of one policy in one step, by their ``places`` in it.

    ``tallies`` are their chosen pages, layer by layer, on the device or on the host; ``recalls``
    and ``looked`` what was measured of each row, and the bytes of a candidate that were looked at.
    """

    policy: PagePolicy
    places: Sequence[int]
    candidates: Candidates
    num_layers: int
    tallies: list[Tensor] = field(default_factory=list)
    recalls: list[Tensor] = field(default_factory=list)
    looked: list[int] = field(default_factory=list)

    @cached_property
    def rows(self) -> Tensor:
        """The places, on the pool's device."""
        return torch.tensor(self.places).to(self.candidates.pool.kv.device)

    def reads(self) -> list[RowReads]:
        """What each row read, once all layers are computed; waits for the device if it chose by
        tensors."""
        size, heads = self.candidates.pool.page_size, self.candidates.num_kv_heads
        dense = sum(layer in self.policy.dense_layers for layer in range(self.num_layers))
        choosing = (self.num_layers - dense) * heads
        recalls = torch.stack(self.recalls).mean(0).tolist() if self.recalls else []
        found, tallies = [], self._tallied()
        for n, row in enumerate(self.candidates.rows):
            others = row.num_other(size) + row.num_patches
            held = row.num_candidates + others
            others *= row.rest
            pages = tallies[n] + choosing * others + dense * heads * held
            looked = heads * row.num_candidates * sum(self.looked)
            recall = recalls[n] if recalls and row.measured else None
            found.append(RowReads(pages, self.num_layers * heads * held, looked, recall))
        return found

    def _tallied(self) -> list[int]:
        """The pages of each row, counted on the host and on the device."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for tally in self.tallies:
            by_device.setdefault(tally.device, []).append(tally)
        sums = [torch.stack(some).sum(0).tolist() for some in by_device.values()]
        return [sum(each) for each in zip(*sums, strict=True)]

    def begin(self, layer: int, q: Tensor) -> None:
        """Nothing: what is chosen is read by `join`."""

    def join(self, layer: int, q: Tensor, states: AttnState, row_state_indptr: Tensor) -> None:
        """Write what the rows choose in ``layer`` as the last of their ``states``."""
        queries = q[self.rows]
        choice = self.policy.choose(layer, queries, self.candidates)
        state = attend_chosen(layer, queries, choice, self.candidates)
        self.count(choice.counts.sum(-1), choice.looked)
        if choice.join is not None:
            state = merge_all((state, choice.join()))
        if any(row.measured for row in self.candidates.rows):
            others = self._others(states, row_state_indptr)
            everything = attend_chosen(
                layer, queries, self.candidates.everything(), self.candidates
            )
            held = torch.logaddexp(state.lse, others) - torch.logaddexp(everything.lse, others)
            self.recalls.append(held.exp().mean(-1))
        if choice.done is not None:
            rest = self._rest(states, row_state_indptr) if choice.told_all else None
            choice.done(state if rest is None else merge_all((state, rest)))
        place = row_state_indptr[self.rows + 1].long() - 1
        states.out[place] = state.out
        states.lse[place] = state.lse

    def count(self, pages: Tensor, looked: int = 0, layers: int = 1) -> None:
        """Count what the choice of some layers read together: ``pages`` of each row, and in each of
        the keys of a candidate besides its summary so many numbers."""
        self.tallies.append(pages)
        pool, summary = self.candidates.pool, self.policy.summary
        width = 0 if summary is None else summary.width * pool.kv.shape[5]
        self.looked.append(layers * (width + looked) * pool.kv.element_size())

    def _others(self, states: AttnState, row_state_indptr: Tensor) -> Tensor:
        """The lse of what each row reads in any case."""
        bounds = row_state_indptr.tolist()
        lses = [states.lse[bounds[n] : bounds[n + 1] - 1].logsumexp(0) for n in self.places]
        return torch.stack(lses)

    def _rest(self, states: AttnState, row_state_indptr: Tensor) -> AttnState:
        """The state of what each row reads in any case."""
        lse, bounds = self._others(states, row_state_indptr), row_state_indptr.tolist()
        pivot = lse.masked_fill(lse == -torch.inf, 0.0)
        outs = []
        for n, whole in zip(self.places, pivot, strict=True):
            mine = slice(bounds[n], bounds[n + 1] - 1)
            weights = (states.lse[mine] - whole).exp()[..., None]
            outs.append((weights * states.out[mine].float()).sum(0))
        return AttnState(torch.stack(outs), lse)


@dataclass(eq=False)
class HostedRows:
    """The rows of one step, by their place in it, that read segments outside of the pool."""

    rows: Tensor
    positions: Sequence[int]
    reads: Sequence[tuple[HostedRead, ...]]
    attention: HostedAttention
    rules: Sequence[ScoreRule]
    _pending: "Future[AttnState] | None" = None

    def begin(self, layer: int, q: Tensor) -> None:
        """Begin the reads of ``layer`` on another thread, while the pool is read."""
        asked = q[self.rows], self.positions, self.reads, self.rules[layer]
        self._pending = self.attention.submit(self.attention.decode, layer, *asked)

    def join(self, layer: int, q: Tensor, states: AttnState, row_state_indptr: Tensor) -> None:
        """Write what was read as the last of the rows' ``states``."""
        assert self._pending is not None, "reads begin before they join"
        state, self._pending = self._pending.result(), None
        place = row_state_indptr[self.rows + 1].long() - 1
        states.out[place] = state.out
        states.lse[place] = state.lse


Joining = SelectedRows | HostedRows | WindowedRows
"""Rows of a step whose states get one more: by `begin`, then `join`."""


@dataclass(frozen=True)
class Reading:
    """One way of reading: rows as the work list has them, and who chooses besides.

    ``key`` says which rows of the step choose; it is empty if none does.
    """

    key: tuple[bool, ...]
    rows: Sequence[DecodeRow]
    groups: Groups
    selected: tuple[Joining, ...] = ()


_RowKey = tuple[PagePolicy, int, int, int, int]


class _KnownRow(NamedTuple):
    """A row's candidates, and what it is known by: numbers of objects that live on with it."""

    names: tuple[object, object]
    candidates: RowCandidates


@dataclass(eq=False)
class _Kept:
    """What holds from step to step while the same rows go on."""

    groups: dict[tuple[bool, ...], tuple[list[object], Groups]] = field(default_factory=dict)
    tables: dict[tuple[PagePolicy, int], CandidateTable] = field(default_factory=dict)
    # the candidates of rows by what they are known by, of the step before and of this one
    rows: dict[_RowKey, _KnownRow] = field(default_factory=dict)
    rows_now: dict[_RowKey, _KnownRow] = field(default_factory=dict)


@dataclass(eq=False)
class Readings:
    """Makes the readings of steps; groups, tables and summaries are kept while they hold, for each
    of a few sets of policies, since rows of one step may be computed in turn.
    ``selected`` are the rows of the latest step that choose. What rows read of hosted segments
    joins their states where ``hosted`` is given, and ``windows`` for rows of windows; on a GPU it
    is carried to the merge."""

    pool: PagePool
    rotations: Sequence[Rotation]
    rules: Sequence[ScoreRule]
    group: Grouping
    array_of: PageArray
    hosted: HostedAttention | None = None
    windows: HostedWindows | None = None
    selected: list[SelectedRows] = field(default_factory=list)
    _kept: _Kept = field(default_factory=_Kept)
    _known: dict[frozenset[PagePolicy], _Kept] = field(default_factory=dict)
    _summaries: dict[str, PageSummaries] = field(default_factory=dict)

    def of(self, rows: Sequence[DecodeRow]) -> list[Reading]:
        """The reading of every layer; layers that read alike have the same object."""
        selecting = {i: row for i, row in enumerate(rows) if isinstance(row, SelectingRow)}
        hosted = self._hosted(rows)
        self._turn_to(frozenset(row.policy for row in selecting.values()))
        if not selecting:
            self.selected = []
            return [Reading((), rows, self._grouped((), rows, rows), hosted)] * len(self.rules)
        self.selected = chosen = self._selected(selecting)
        made: dict[tuple[bool, ...], Reading] = {}
        readings = []
        for layer in range(len(self.rules)):
            choosing = {i for i, row in selecting.items() if layer not in row.policy.dense_layers}
            key = tuple(i in choosing for i in range(len(rows))) if choosing else ()
            if key not in made:
                parts = tuple(s for s in chosen if layer not in s.policy.dense_layers)
                size = self.pool.page_size
                others = [
                    _others(selecting[i], size) if i in choosing else r for i, r in enumerate(rows)
                ]
                groups = self._grouped(key, rows, others)
                made[key] = Reading(key, others, groups, parts + hosted)
            readings.append(made[key])
        known = self._kept.groups
        self._kept.groups = {key: held for key, held in known.items() if key in made}
        return readings

    def _turn_to(self, policies: frozenset[PagePolicy]) -> None:
        """Go on with what is kept of rows of these policies."""
        self._kept = self._known.pop(policies) if policies in self._known else _Kept()
        self._known[policies] = self._kept
        if len(self._known) > _MOST_KNOWN:
            self._known.pop(next(iter(self._known)))

    def summaries(self, policy: PagePolicy) -> PageSummaries | None:
        """What is kept of pages for ``policy``; memory is taken when it is first asked for."""
        summary = policy.summary
        if summary is None:
            return None
        if summary.name not in self._summaries:
            self._summaries[summary.name] = PageSummaries(self.pool, summary)
        return self._summaries[summary.name]

    def _hosted(self, rows: Sequence[DecodeRow]) -> tuple[Joining, ...]:
        reading = [index for index, row in enumerate(rows) if row.hosted]
        if not reading or self.hosted is None:
            return ()
        found: list[Joining] = []
        alone = [n for n in reading if rows[n].window is None]
        if alone:
            positions, reads = zip(
                *((rows[n].position, rows[n].hosted) for n in alone), strict=True
            )
            own = torch.tensor(alone), positions, reads
            found.append(HostedRows(*own, self.hosted, self.rules))
        inside = [(n, window) for n in reading if (window := rows[n].window) is not None]
        if inside:
            assert self.windows is not None, "who reads hosted segments has room for windows"
            windows = [window for _, window in inside]
            positions, reads = zip(
                *((rows[n].position, rows[n].hosted) for n, _ in inside), strict=True
            )
            work = self.windows.load(positions, reads, windows)
            found.append(WindowedRows(torch.tensor([n for n, _ in inside]), self.windows, work))
        return tuple(found)

    def _selected(self, selecting: dict[int, SelectingRow]) -> list[SelectedRows]:
        by_policy: dict[PagePolicy, list[int]] = {}
        for index, row in selecting.items():
            by_policy.setdefault(row.policy, []).append(index)
        self._kept.rows, self._kept.rows_now = self._kept.rows_now, {}
        chosen = []
        for policy, places in by_policy.items():
            rows = [selecting[place] for place in places]
            how = self.pool, self.rotations, self.rules, self.summaries(policy)
            candidates = Candidates(rows, policy, partial(self._table, policy), *how)
            # what is kept of pages is made before anybody asks
            _ = candidates.leading
            chosen.append(SelectedRows(policy, places, candidates, len(self.rules)))
        return chosen

    def _table(self, policy: PagePolicy, rows: Sequence[SelectingRow]) -> CandidateTable:
        """The table of some rows of ``policy``: the same object while it holds, and of rows that go
        on as they were the same parts."""
        parts, new = [], []
        for row in rows:
            others = row.num_other(self.pool.page_size)
            key = policy, id(row.settled), id(row.tail.pages), row.sealed, others
            known = self._kept.rows_now.get(key) or self._kept.rows.get(key)
            if known is None:
                part = row_candidates(row, self.pool.page_size, len(self.rules), self.array_of)
                known = _KnownRow((row.settled, row.tail.pages), part)
                new.append(row)
            self._kept.rows_now[key] = known
            parts.append(known.candidates)
        self._summarise(policy, new)
        kept = self._kept.tables.get((policy, len(parts)))
        if kept is None or any(one is not two for one, two in zip(kept.rows, parts, strict=True)):
            kept = CandidateTable(parts, self.pool.kv.device)
            self._kept.tables[policy, len(parts)] = kept
        return kept

    def _summarise(self, policy: PagePolicy, rows: Sequence[SelectingRow]) -> None:
        """Make what ``policy`` must know of candidates of ``rows``, where it is missing."""
        summaries = self.summaries(policy)
        if summaries is None or not rows:
            return
        held = [summarised(row, self.pool.page_size, self.array_of) for row in rows]
        pages, counts = (np.concatenate(columns) for columns in zip(*held, strict=True))
        # rows of one document have its pages in common
        pages, first = np.unique(pages, return_index=True)
        summaries.write(pages, counts[first])

    def _grouped(
        self, key: tuple[bool, ...], rows: Sequence[DecodeRow], others: Sequence[DecodeRow]
    ) -> Groups:
        # a row is known by its lists; settled spans alone would not do, since all that are empty
        # are one object
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
            groups = self.group(others)
            for index, row in choosing.items():
                groups.tail_starts[index] = row.sealed
                entry = Entry(index, row.position, 0)
                groups.items.append(Item([], _LAST, [entry]))
            for index, row in enumerate(rows):
                if row.hosted and self.hosted is not None:
                    assert index not in choosing, "a row chooses pages or reads by an index"
                    groups.items.append(Item([], _LAST, [Entry(index, row.position, 0)]))
            kept = names, groups
            self._kept.groups = {**self._kept.groups, key: kept} if key else {key: kept}
        return kept[1]


def _others(row: SelectingRow, page_size: int) -> DecodeRow:
    """A row that chooses, without what it chooses from; `Groups.tail_starts` says what else it
    leaves out, or the length of its tail: all of it."""
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

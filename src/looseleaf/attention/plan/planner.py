"""The attention plan of one step: a work list of its decode rows, a span list of its new rows.

The host plans once a step for all layers; operators get plain int32 arrays. A cost model decides
which rows share reads and how far items are cut."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from looseleaf.attention.plan.chunks import (
    PrefillChunk,
    flat_chunks,
    flat_tails,
    host_spans,
    is_patched,
    sent_spans,
    with_units,
)
from looseleaf.attention.plan.cost_model import CostModel, ReadBySpans, TileCost
from looseleaf.attention.plan.cuts import equal_shares, fixed_cuts
from looseleaf.attention.plan.gathered import (
    MOST_GATHERED,
    GatheredChunks,
    gather_chunks,
    gathered_spans,
    read_by_spans,
)
from looseleaf.attention.plan.groups import DecodeRow, Groups, Item, group_rows
from looseleaf.attention.plan.host_spans import HostSpans
from looseleaf.attention.plan.lists import (
    BoolArray,
    FlatItems,
    HostWork,
    IntArray,
    Pieces,
    host_work,
    int32,
)
from looseleaf.ops.hopper.attention import PROGRAMS
from looseleaf.ops.partial_attention.work_list import Tile, WorkList
from looseleaf.ops.prefill_attention.span_list import SpanList
from looseleaf.ops.prefill_attention.units import KEYS, UnitCosts

# a batch-invariant plan cuts every segment at the same positions
_INVARIANT_SPLIT = 1024
# packed rows of a prefill tile
_TILE_ROWS = 128
# steps with at most this many new rows use a work list if their tiles leave processors idle
_FEW_NEW_ROWS = 512
# the most parts of a tile's keys, and the fewest keys of a part
_MOST_PARTS = 8
_PART_KEYS = 512
# the most keys that a row reads during its merge
_FINISHED_KEYS = 256
# microseconds of a tile part at a span border, by consumer warpgroups of its program
_BORDERS = {2: 2.6, 1: 0.9}
# the shortest page list that is cached as an array, and the most cached lists
_WORTH_KEEPING = 16
_MOST_KEPT = 4096


@dataclass(frozen=True)
class AttentionPlan:
    """``work`` covers the first ``num_work_rows`` rows of a step, ``spans`` the others; either may
    be None.

    A step's rows are its decode rows, then its chunks' rows, in order. The work list covers decode
    rows, and all new rows of a step with few of them.
    """

    num_work_rows: int
    work: WorkList | None
    spans: SpanList | None

    @property
    def row_positions(self) -> Tensor:
        """The position of every row in its sequence, on the device of the lists."""
        lists = []
        if self.work is not None:
            lists.append(self.work.row_positions[: self.num_work_rows])
        if self.spans is not None:
            lists.append(self.spans.row_positions)
        return lists[0] if len(lists) == 1 else torch.cat(lists)


@dataclass
class PlanCounters:
    """Decisions of the plans, summed over steps: items over settled pages, items shared by several
    rows, pieces read by narrow and by wide tiles, gathered keys."""

    items: int = 0
    grouped_items: int = 0
    grouped_rows: int = 0
    refused_groups: int = 0
    narrow_pieces: int = 0
    wide_pieces: int = 0
    gathered_keys: int = 0


@dataclass(eq=False)
class Planner:
    """``batch_invariant``: a row's output has the same bits in every batch, grouped or not: one
    tile shape, cuts at fixed positions, a fixed merge order. ``gathering``: kernels read gathered
    keys faster (see `CostModel.worth_gathering`). ``finishing``: after a wide tile, rows read their
    few own keys during the merge; for plain rules only.
    """

    page_size: int
    num_qo_heads: int
    num_kv_heads: int
    device: torch.device
    costs: CostModel
    batch_invariant: bool = False
    finishing: bool = False
    gathering: bool = False
    counters: PlanCounters = field(default_factory=PlanCounters)
    _pages: dict[int, tuple[Sequence[int], IntArray]] = field(default_factory=dict)
    _settled: tuple[Groups, FlatItems] | None = None

    def group(self, rows: Sequence[DecodeRow], *, grouping: bool) -> Groups:
        """The groups of ``rows``, where the cost model agrees."""
        step = _INVARIANT_SPLIT // self.page_size if self.batch_invariant else 1
        groups = group_rows(rows, grouping=grouping, worth=self._worth, step=step)
        self.counters.refused_groups += groups.refused
        return groups

    def plan(
        self,
        rows: Sequence[DecodeRow],
        groups: Groups,
        chunks: Sequence[PrefillChunk],
        *,
        finish: bool = False,
    ) -> AttentionPlan:
        """The plan of a step of ``rows``, grouped as ``groups``, and ``chunks``; ``finish`` as in
        `host_work`."""
        if not rows and not chunks:
            return AttentionPlan(0, None, None)
        if work := self.host_work(rows, groups, chunks, finish=finish):
            return AttentionPlan(work.num_rows, work.to(self.device), None)
        work = self.host_work(rows, groups, finish=finish) if rows else None
        return AttentionPlan(
            len(rows),
            work.to(self.device) if work else None,
            self.span_list(chunks),
        )

    def host_work(
        self,
        rows: Sequence[DecodeRow],
        groups: Groups,
        chunks: Sequence[PrefillChunk] = (),
        *,
        finish: bool = False,
    ) -> HostWork | None:
        """The work list of all rows of the step; None if the new rows need a span list.

        Without ``finish`` a row's states cover all of its keys, and further states may join. With
        it the single state of a row is its output."""
        if chunks and not self.by_work_list(chunks):
            return None
        positions = [int32([row.position for row in rows])]
        flats = [self._settled_items(groups), flat_tails(rows, groups.tail_starts, self.page_array)]
        if chunks:
            positions += [int32(chunk.positions) for chunk in chunks]
            flats.append(flat_chunks(chunks, len(rows), self.page_size, self.page_array))
        flat = FlatItems.concatenate(flats)
        positions_of_all = np.concatenate(positions)
        pieces, classes = self._cut(flat, len(positions_of_all))
        if finish and not any(row.hosted for row in rows):
            if self.finishing:
                pieces, classes = self._finished(flat, pieces, classes)
            if len(classes) == 1 and pieces.one_entry_a_row(flat, len(positions_of_all)):
                classes = [(replace(tile, whole=True), count) for tile, count in classes]
        return host_work(flat, pieces, positions_of_all, self.page_size, classes)

    @property
    def tile_rows(self) -> int:
        """Rows of a tile of a span list."""
        return max(1, _TILE_ROWS // self._group)

    @property
    def _group(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    def _worth(self, num_rows: int, num_pages: int) -> bool:
        if self.batch_invariant:
            return True
        return self.costs.worth_sharing(num_rows, self._group, num_pages * self.page_size)

    def by_work_list(self, chunks: Sequence[PrefillChunk]) -> bool:
        """Whether new rows join the work list of the step's decode rows."""
        # a span list reads a bitmap once a key, a work list once a row and key
        if self.batch_invariant or is_patched(chunks):
            return False
        few = sum(len(chunk.positions) for chunk in chunks) <= _FEW_NEW_ROWS
        return few and self._num_programs(chunks) < self.costs.wide.programs

    def span_list(
        self,
        chunks: Sequence[PrefillChunk],
        *,
        gather: bool | None = None,
        groups: int | None = None,
    ) -> SpanList:
        """The span list of ``chunks``, in parts where its tiles would leave processors idle.

        ``gather`` and ``groups`` (consumer warpgroups of a program) override the cost model."""
        return sent_spans(self.host_spans(chunks, gather=gather, groups=groups), self.device)

    def host_spans(
        self,
        chunks: Sequence[PrefillChunk],
        *,
        gather: bool | None = None,
        groups: int | None = None,
    ) -> HostSpans:
        """The arrays of `span_list` on the host."""
        read = read_by_spans(chunks, self.tile_rows, self.num_kv_heads)
        if (gathered := self._gathered(chunks, read, gather)) is not None:
            self.counters.gathered_keys += gathered.num_keys
            spans = gathered_spans(gathered, self.tile_rows)
            return with_units(spans, self.num_kv_heads, self._unit_costs(2))
        parts = 1
        if is_patched(chunks) and not self.batch_invariant:
            keys = max(sum(span.length for span in chunk.spans) for chunk in chunks)
            parts = -(-self.costs.wide.programs // self._num_programs(chunks))
            parts = max(1, min(parts, _MOST_PARTS, keys // _PART_KEYS))
        groups = groups or (2 if self.batch_invariant else self.costs.groups_for(read))
        tile_rows = max(1, self.tile_rows * groups // 2)
        spans = host_spans(chunks, tile_rows, parts, self.page_array)
        on_gpu = self.device.type == "cuda"
        costs = self._unit_costs(groups)
        return with_units(spans, self.num_kv_heads, costs, groups) if on_gpu else spans

    def _unit_costs(self, groups: int) -> UnitCosts | None:
        """Costs of units for programs of ``groups`` consumer warpgroups; None in batch-invariant
        mode, where tiles stay whole."""
        if self.batch_invariant:
            return None
        costs, wide = self.costs, self.costs.wide
        programs, block = wide.programs * PROGRAMS[groups], KEYS * wide.per_key
        border = _BORDERS[groups]
        return UnitCosts(programs, wide.start, block, border, costs.launch, costs.per_state)

    def _gathered(
        self, chunks: Sequence[PrefillChunk], read: ReadBySpans, gather: bool | None
    ) -> GatheredChunks | None:
        """``chunks`` over gathered keys, None where that does not pay. Batch-invariant plans never
        gather: whether it pays depends on the batch."""
        if not self.gathering or self.batch_invariant or not chunks or gather is False:
            return None
        pays = gather or self.costs.worth_gathering(read, self.num_kv_heads)
        if read.keys > MOST_GATHERED or not pays:
            return None
        return gather_chunks(chunks, self.page_size, self.page_array)

    def _num_programs(self, chunks: Sequence[PrefillChunk]) -> int:
        tiles = sum(-(-len(chunk.positions) // self.tile_rows) for chunk in chunks)
        return tiles * self.num_kv_heads

    def _settled_items(self, groups: Groups) -> FlatItems:
        """The items of settled spans, cached while the rows stay the same."""
        if self._settled is None or self._settled[0] is not groups:
            self._settled = groups, self._flat(groups.items)
        return self._settled[1]

    def _flat(self, items: Sequence[Item]) -> FlatItems:
        pages = [self.page_array(item.pages) for item in items]
        return FlatItems.create(items, pages, final=True)

    def page_array(self, pages: Sequence[int]) -> IntArray:
        """``pages`` as an array, cached between steps: page lists only grow."""
        if len(pages) < _WORTH_KEEPING:
            return int32(pages)
        cached = self._pages.get(id(pages))
        if cached is None or cached[0] is not pages or len(cached[1]) > len(pages):
            if len(self._pages) >= _MOST_KEPT:
                self._pages.clear()
            cached = pages, int32(pages)
        elif len(cached[1]) < len(pages):
            cached = pages, np.append(cached[1], int32(pages[len(cached[1]) :]))
        else:
            return cached[1]
        self._pages[id(pages)] = cached
        return cached[1]

    def _cut(self, flat: FlatItems, num_rows: int) -> tuple[Pieces, list[tuple[Tile, int]]]:
        """The pieces in the order of their tiles, and the tiles with their numbers of pieces."""
        packed, narrow = flat.num_entries * self._group, self.costs.narrow
        if self.batch_invariant:
            parts = -(-flat.num_entries // max(1, narrow.tile.block_m // self._group))
            pieces = fixed_cuts(flat, parts, _INVARIANT_SPLIT // self.page_size)
            return pieces, [(narrow.tile, len(pieces.item))]
        wide = self._wide(packed, flat.num_pages)
        merged = bool(wide.any()) or flat.entries.shape[1] > num_rows
        pieces = self._pieces(narrow, flat, ~wide, merged)
        count = len(pieces.item)
        classes = [(narrow.tile, count)]
        self.counters.narrow_pieces += int((pieces.stop_entry > pieces.first_entry).sum())
        if wide.any():
            pieces = pieces.join(self._pieces(self.costs.wide, flat, wide, merged))
            classes.append((self.costs.wide.tile, len(pieces.item) - count))
            self.counters.wide_pieces += len(pieces.item) - count
        return pieces, classes

    def _pieces(self, cost: TileCost, flat: FlatItems, chosen: BoolArray, merged: bool) -> Pieces:
        """The ``chosen`` items, cut in the fastest way for ``cost``: in parts of about one length,
        longest first, or in equal shares for all programs."""
        entry_parts = -(-flat.num_entries // max(cost.tile.block_m // self._group, 1)) * chosen
        keys = np.repeat(flat.num_pages * self.page_size, entry_parts)
        entries = np.repeat(flat.num_entries / np.maximum(entry_parts, 1), entry_parts)
        read = self.costs.tile_read(cost, keys, entries, self.num_kv_heads, merged=merged)
        split, time = read.split()
        step = max(1, cost.tile.block_n // self.page_size)
        programs, rest = divmod(cost.programs, self.num_kv_heads)
        # pieces of the same keys stay adjacent
        equal = rest == 0 and entry_parts.max(initial=0) == 1
        if equal and read.shared(1, len(keys), 0) < time:
            shares = equal_shares(flat, chosen, programs, step)
            if shares is not None:
                pieces, rounds = shares
                counts = pieces.stop_entry - pieces.first_entry
                if read.shared(rounds, int((counts > 0).sum()), int(counts.sum())) < time:
                    return pieces
        page_parts = np.maximum(-(-flat.num_pages // max(1, split // self.page_size)), 1)
        pieces = Pieces.cut(flat, page_parts, entry_parts)
        order = np.argsort(pieces.first_page - pieces.stop_page, kind="stable")
        return pieces.take(order.astype(np.int32))

    def _finished(
        self, flat: FlatItems, pieces: Pieces, classes: list[tuple[Tile, int]]
    ) -> tuple[Pieces, list[tuple[Tile, int]]]:
        """Moves the narrow pieces after the wide ones, to be read during the merge. Requires that
        each is short and its row's only narrow piece."""
        if len(classes) < 2 or len(flat.mask_words):
            return pieces, classes
        (narrow, count), wide = classes
        item, entry = pieces.item[:count], pieces.first_entry[:count]
        rows = flat.entries[0, flat.entry_indptr[item] + entry]
        lengths = (pieces.stop_page - pieces.first_page)[:count] * self.page_size
        alone = (pieces.stop_entry[:count] - entry == 1).all() and len(set(rows.tolist())) == count
        if not alone or lengths.max(initial=0) > _FINISHED_KEYS:
            return pieces, classes
        order = np.roll(np.arange(len(pieces.item), dtype=np.int32), -count)
        return pieces.take(order), [wide, (replace(narrow, finishing=True), count)]

    def _wide(self, packed: IntArray, num_pages: IntArray) -> BoolArray:
        """Mask of the items for the wide tile: none unless the gain exceeds one more launch."""
        gains = np.zeros(len(packed))
        for n in np.flatnonzero(packed > self.costs.narrow.tile.block_m):
            gains[n] = self.costs.wide_gain(int(packed[n]), int(num_pages[n]) * self.page_size)
        wide = gains > 0
        if gains[wide].sum() * self.num_kv_heads < self.costs.launch:
            wide[:] = False
        return wide

"""Decode graphs: CUDA graphs of steps of few rows, from embedding to logits in one launch.

A graph is captured for a padded number of rows and the capacities of its work list. It replays
every step that fits. The graph copies tokens, slots, positions and the work list from pinned host
memory. Padding rows have no slots and no states, so they write and read nothing."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from looseleaf.attention.buffers.work_buffer import WorkBuffer, WorkCapacity
from looseleaf.attention.paged import PagedAttention
from looseleaf.attention.plan.chunks import PrefillChunk
from looseleaf.attention.plan.groups import DecodeRow, ReadSpan
from looseleaf.attention.plan.lists import HostWork, IntArray
from looseleaf.attention.select.device_topk import ChoiceBuffer, DeviceChoice, HostChoice, HostStep
from looseleaf.graphs.capture import Captures, Replayable, Within
from looseleaf.graphs.rows import RowInputs, arrived_tokens
from looseleaf.graphs.step_result import StepResult
from looseleaf.index.host.gpu import DeviceWork
from looseleaf.models import Decoder
from looseleaf.ops.partial_attention.work_list import Tile

# past this a step computes long enough to hide its launches
MAX_ROWS = 512
_FINE, _COARSE = 16, 64
# least capacity for entries, for few and for more rows
_ENTRIES, _FEW_LISTED = (1024, 8192), 64
# columns of the row table; the last lists the logit rows
_ROW_NUMBERS = ("tokens", "slots", "places", "logit_rows")
# usual number of concurrent rows that read around replaced tokens
_USUALLY_PATCHED = 8

Kind = Literal["alone", "alone, in parts", "behind one", "behind one, long", "patched"]
"""The reads of decode rows: private keys, whole or in parts; one shared segment, then one private
token or hundreds; documents with replaced tokens."""


class WorkKey(NamedTuple):
    """The key of launches over one work list. They do not depend on how full its capacity is.

    ``choice`` is the `HostChoice.key` of a list with a policy."""

    capacity: WorkCapacity
    tiles: tuple[Tile, ...]
    choice: tuple[object, ...] = ()


class GraphKey(NamedTuple):
    """The key of a graph: its work lists, and the work list of each layer.

    Rows of a ``hosted`` graph may read segments in host memory."""

    works: tuple[WorkKey, ...]
    layers: tuple[int, ...]
    hosted: bool = False

    @property
    def rows(self) -> int:
        """The rows of a step."""
        return self.works[0].capacity.rows


class _Lists(NamedTuple):
    """One work list of a captured step, with the buffers of its page selection."""

    work: WorkBuffer
    choice: ChoiceBuffer | None
    device: DeviceChoice | None


@dataclass(frozen=True)
class _Graph:
    """A captured step: its lists, which are rewritten, and the logits that a replay writes."""

    graph: Replayable
    lists: Sequence[_Lists]
    logits: Tensor

    def load(self, step: HostStep, rows: Mapping[str, IntArray]) -> None:
        """Write the numbers of a step to the lists; the first list also has the row table."""
        for nth, (lists, (work, choice)) in enumerate(zip(self.lists, step.works, strict=True)):
            lists.work.load(work, {} if nth else rows)
            if lists.choice is not None and choice is not None:
                lists.choice.load(choice)

    def replay(self) -> None:
        """Run the loaded step."""
        self.graph.replay()
        for lists in self.lists:
            lists.work.sent()

    def tell(self, step: HostStep) -> None:
        """Give the rows of a replayed step the counts that only the device has."""
        for lists, (_, choice) in zip(self.lists, step.works, strict=True):
            if lists.device is not None and choice is not None:
                lists.device.tally(choice)


@dataclass(eq=False)
class StepGraphs:
    """The decode graphs of one model over one pool, captured at their first use.

    Graphs of a ``rehearsal`` are useless, see `Captures`."""

    model: Decoder
    attention: PagedAttention
    max_num_seqs: int
    rehearsal: bool = False
    replays: int = 0
    _graphs: dict[GraphKey, _Graph] = field(default_factory=dict)

    def __post_init__(self) -> None:
        device = self.model.device
        self._previous = torch.zeros(MAX_ROWS, dtype=torch.int64, device=device)
        self._captures = Captures(device, rehearsal=self.rehearsal)

    @property
    def num_captured(self) -> int:
        """Steps captured so far."""
        return len(self._graphs)

    def clear(self) -> None:
        """Free all graphs; no step may be in flight."""
        self._graphs.clear()

    def run(
        self,
        rows: RowInputs,
        decode: Sequence[DecodeRow],
        chunks: Sequence[PrefillChunk],
        previous: Int[Tensor, " sampled"] | None,
    ) -> StepResult | None:
        """The result of a step, or None if it has too many rows for a graph."""
        if rows.num_rows > MAX_ROWS or (previous is not None and len(previous) > MAX_ROWS):
            return None
        step = self.attention.host_step(decode, chunks, padded_rows(rows.num_rows))
        if step is None:
            return None
        reads_hosted = any(row.hosted for row in decode)
        graph = self._graph_for(rows.num_rows, step, reads_hosted)
        if previous is not None:
            self._previous[: len(previous)].copy_(previous)
        graph.load(step, _row_numbers(rows, padded_rows(rows.num_rows)))
        if reads_hosted:
            # last, because it waits until the previous step has read the buffer
            self.attention.load_hosted(decode, padded_rows(rows.num_rows))
        launched = time.perf_counter()
        graph.replay()
        graph.tell(step)
        if reads_hosted:
            self.attention.sent()
        self.replays += 1
        logits = graph.logits[: rows.num_rows if rows.logit_rows is None else len(rows.logit_rows)]
        return StepResult(logits, step.reads.groups, step.reads.selected, launched)

    def usual(self) -> list[GraphKey]:
        """The keys of usual steps: every number of rows and kind, for short and long work lists.

        Steps with more rows than sequences contain the rows of short prompts."""
        most = padded_rows(min(self.max_num_seqs, MAX_ROWS))
        keys = []
        for rows in reversed(padded_sizes()):
            kinds: tuple[Kind, ...] = ("alone", "alone, in parts", "behind one, long")
            kinds += ("behind one",) if rows <= most else ()
            kinds += ("patched",) if rows <= _USUALLY_PATCHED else ()
            for kind in kinds:
                keys += [self._usual_key(rows, kind, entries) for entries in _ENTRIES]
        return list(dict.fromkeys(key for key in keys if key is not None))

    def prepare(self, key: GraphKey) -> None:
        """Capture the graph of ``key``, unless it exists."""
        if key not in self._graphs:
            self._graphs[key] = self._capture(key, [None])

    def _usual_key(self, num_rows: int, kind: Kind, entries: int) -> GraphKey | None:
        """The key of steps of this kind with a list for ``entries`` entries; None if there are no
        such steps."""
        rows = _example_rows(num_rows, kind, self.attention.pool.page_size)
        step = self.attention.host_step(rows, (), num_rows)
        assert step is not None, "a step of decode rows only is all work list"
        key = _key_of(num_rows, *step.works[0])
        whole = any(tile.whole for tile in key.tiles)
        # rows with one state each never need a longer list
        if key.capacity.entries > entries or (whole and key.capacity.entries < entries):
            return None
        capacity = replace(key.capacity, entries=entries)
        return GraphKey((key._replace(capacity=capacity),), step.layers)

    def _graph_for(self, num_rows: int, step: HostStep, hosted: bool) -> _Graph:
        works = tuple(_key_of(num_rows, *listed) for listed in step.works)
        key = GraphKey(works, step.layers, hosted)
        if key not in self._graphs:
            self._graphs[key] = self._capture(key, [choice for _, choice in step.works])
        return self._graphs[key]

    def _capture(self, key: GraphKey, choices: Sequence[HostChoice | None]) -> _Graph:
        device = self.model.device
        lists = _lists(key, choices, device)
        hosted = self.attention.hosted_room(key.rows) if key.hosted else None

        def run(within: Within) -> Tensor:
            return self._forward(key, lists, hosted, within)

        def rewind() -> None:
            for listed in lists:
                listed.work.unsent()

        logits, [graph] = self._captures.capture(run, rewind=rewind)
        return _Graph(graph, lists, logits)

    def _forward(
        self, key: GraphKey, lists: Sequence[_Lists], hosted: DeviceWork | None, within: Within
    ) -> Tensor:
        for listed in lists:
            listed.work.fetch()
        tokens, slots, offsets, logit_rows = _rows_of(lists[0].work)
        works = [(listed.work.work, listed.device) for listed in lists]
        attend = self.attention.over(works, key.layers, slots, offsets, hosted)
        hidden = self.model.forward(arrived_tokens(tokens, self._previous), within(attend))
        return self.model.logits(hidden.index_select(0, logit_rows))


def _key_of(num_rows: int, work: HostWork, choice: HostChoice | None) -> WorkKey:
    capacity = WorkCapacity(
        padded_rows(num_rows),
        room_for(work.num_items, 512, 8),
        room_for(work.num_entries, _ENTRIES[padded_rows(num_rows) > _FEW_LISTED], 8),
        room_for(work.num_pages, 8192, 4),
        room_for(work.num_mask_words, 1024, 8) if work.num_mask_words else 0,
    )
    return WorkKey(capacity, work.tiles, () if choice is None else choice.key)


def _lists(
    key: GraphKey, choices: Sequence[HostChoice | None], device: torch.device
) -> list[_Lists]:
    """The empty lists of a graph; the first has room for the row table."""
    lists: list[_Lists] = []
    for work_key, choice in zip(key.works, choices, strict=True):
        # 64 bits each
        more = {} if lists else dict.fromkeys(_ROW_NUMBERS, 2 * key.rows)
        work = WorkBuffer(work_key.capacity, work_key.tiles, device, more)
        if choice is None:
            lists.append(_Lists(work, None, None))
            continue
        buffer = ChoiceBuffer(choice, device)
        chosen = DeviceChoice(work.work, buffer, choice.how, choice.kept)
        lists.append(_Lists(work, buffer, chosen))
    _, slots, _, _ = _rows_of(lists[0].work)
    slots.fill_(-1)
    return lists


def _rows_of(work: WorkBuffer) -> list[Tensor]:
    """Tokens, slots, offsets and logit rows of a step on the device."""
    return [work.numbers[name].view(torch.int64) for name in _ROW_NUMBERS]


def _row_numbers(rows: RowInputs, padded: int) -> dict[str, IntArray]:
    """The same numbers on the host; padding rows have slot -1."""
    table = np.zeros((len(_ROW_NUMBERS), padded), dtype=np.int64)
    table[1] = -1
    table[:3, : rows.num_rows] = rows.table
    logit_rows = range(rows.num_rows) if rows.logit_rows is None else rows.logit_rows
    table[3, : len(logit_rows)] = logit_rows
    return dict(zip(_ROW_NUMBERS, table.view(np.int32), strict=True))


def padded_sizes() -> list[int]:
    """The numbers of rows that graphs are captured for."""
    fine = range(_FINE, 8 * _FINE, _FINE)
    return [1, 2, 4, 8, *fine, *range(8 * _FINE, MAX_ROWS + 1, _COARSE)]


def padded_rows(num_rows: int) -> int:
    """The smallest number of rows with a graph that holds ``num_rows``."""
    return next(size for size in padded_sizes() if size >= num_rows)


def room_for(count: int, least: int, factor: int) -> int:
    """A capacity for ``count``: one of few, because each needs separate graphs."""
    capacity = least
    while capacity < count:
        capacity *= factor
    return capacity


def _example_rows(num_rows: int, kind: Kind, page_size: int) -> list[DecodeRow]:
    """Decode rows of one kind; their pages are never read."""

    def span(first: int, offset: int, length: int, **other: Any) -> ReadSpan:
        return ReadSpan(range(first, first - (-length // page_size)), offset, length, **other)

    common = span(0, 0, 4096, sharable=4096 // page_size)
    settled: tuple[ReadSpan, ...] = (common,) if kind.startswith("behind") else ()
    if kind == "patched":
        hidden = np.ones(16, dtype=np.int32)
        patch = span(600, 0, 16, sharable=0, places=range(16))
        settled = (span(0, 0, 512, sharable=0, hidden=hidden), patch)
    own = 500 if kind == "behind one, long" else 1
    tails = (span(1000 + row, 4096, own, sharable=0) for row in range(num_rows))
    before = [settled] * num_rows
    if kind == "alone, in parts":
        before = [(span(2000 + row, 0, page_size, sharable=0),) for row in range(num_rows)]
    return [DecodeRow(4095 + own, read, tail) for read, tail in zip(before, tails, strict=True)]

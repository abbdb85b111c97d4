"""Steps of few rows as CUDA graphs: the whole forward, embedding to logits, in one launch.

A graph is captured for a padded number of rows and the capacities of its work list, and serves
every step that fits. What differs from step to step (tokens, slots, positions, the work list) is
data on the device, which one copy brings up to date. Rows that pad a step have no slot, so they
write nothing, and no states, so they read nothing.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.attention.device_choice import ChoiceBuffer, DeviceChoice, HostChoice, HostStep
from looseleaf.attention.groups import DecodeRow, ReadSpan
from looseleaf.attention.hosted_device import DeviceWork
from looseleaf.attention.lists import HostWork, WorkBuffer, WorkCapacity
from looseleaf.attention.paged import PagedAttention
from looseleaf.attention.plan import PrefillChunk
from looseleaf.engine.rows import RowInputs, arrived_tokens, to_device
from looseleaf.models import Decoder
from looseleaf.ops.partial_attention.work_list import Tile

# past this a step computes long enough to hide its launches
MAX_ROWS = 512
_FINE, _COARSE = 16, 64
# room for entries at least: of few rows, and of more
_ENTRIES, _FEW_LISTED = (1024, 8192), 64
# so many rows at once that read around replaced tokens are usual
_USUALLY_PATCHED = 8

Kind = Literal["alone", "alone, in parts", "behind one", "behind one, long", "patched"]
"""What decode rows read: nothing that others read, at once or in parts; one long segment, and
behind it a token of their own, or hundreds; around tokens that are replaced."""


class WorkKey(NamedTuple):
    """What the launches over one work list depend on: not on how full its capacity is. ``choice``
    is the `HostChoice.key` of one whose rows choose."""

    capacity: WorkCapacity
    tiles: tuple[Tile, ...]
    choice: tuple[object, ...] = ()


class GraphKey(NamedTuple):
    """What a graph is made for: some work lists, and which of them each layer reads by. Rows of a
    ``hosted`` one may read segments in the host's memory."""

    works: tuple[WorkKey, ...]
    layers: tuple[int, ...]
    hosted: bool = False

    @property
    def rows(self) -> int:
        """The rows of a step."""
        return self.works[0].capacity.rows


class _Lists(NamedTuple):
    """One work list of a captured step, and the numbers of what is chosen in it."""

    work: WorkBuffer
    choice: ChoiceBuffer | None
    device: DeviceChoice | None


@runtime_checkable
class Replayable(Protocol):
    """What was captured once and runs again over what stands in its tensors then."""

    def replay(self) -> None:
        """Run."""
        ...


@dataclass(frozen=True)
class _Graph:
    """A captured step: its lists, which are rewritten, and the logits that a replay writes."""

    graph: Replayable
    lists: Sequence[_Lists]
    logits: Tensor

    def load(self, step: HostStep) -> None:
        """Bring the numbers of a step to the lists."""
        for lists, (work, choice) in zip(self.lists, step.works, strict=True):
            lists.work.load(work)
            if lists.choice is not None and choice is not None:
                lists.choice.load(choice)

    def tell(self, step: HostStep) -> None:
        """Tell the rows of a step that was replayed what only the device counts."""
        for lists, (_, choice) in zip(self.lists, step.works, strict=True):
            if lists.device is not None and choice is not None:
                lists.device.tell(choice)


@dataclass(eq=False)
class StepGraphs:
    """The graphs of one model over one pool, captured when they are first needed."""

    model: Decoder
    attention: PagedAttention
    max_num_seqs: int
    replays: int = 0
    _graphs: dict[GraphKey, _Graph] = field(default_factory=dict)

    def __post_init__(self) -> None:
        device = self.model.device
        # tokens, slots, places and the rows whose logits are wanted
        self._inputs = torch.zeros((4, MAX_ROWS), dtype=torch.int64, device=device)
        self._previous = torch.zeros(MAX_ROWS, dtype=torch.int64, device=device)
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def num_captured(self) -> int:
        """Steps captured so far."""
        return len(self._graphs)

    def run(
        self,
        rows: RowInputs,
        decode: Sequence[DecodeRow],
        chunks: Sequence[PrefillChunk],
        previous: Int[Tensor, " sampled"] | None,
    ) -> Float[Tensor, "wanted vocab_size"] | None:
        """The logits that are wanted of a step, or None if it has too many rows for a graph."""
        if rows.num_rows > MAX_ROWS or (previous is not None and len(previous) > MAX_ROWS):
            return None
        step = self.attention.host_step(decode, chunks, padded_rows(rows.num_rows))
        if step is None:
            return None
        reads_hosted = any(row.hosted for row in decode)
        graph = self._graph_for(rows.num_rows, step, reads_hosted)
        self._load(rows)
        if previous is not None:
            self._previous[: len(previous)].copy_(previous)
        graph.load(step)
        if reads_hosted:
            # last of all: it waits until the step before has read
            self.attention.load_hosted(decode, padded_rows(rows.num_rows))
        self.attention.planner.launching()
        graph.graph.replay()
        graph.tell(step)
        if reads_hosted:
            self.attention.sent()
        self.replays += 1
        return graph.logits[: rows.num_rows if rows.wanted is None else len(rows.wanted)]

    def usual(self) -> list[GraphKey]:
        """What usual steps are replayed by: every number of rows, for short and for long work
        lists, with rows that read alone and with rows that read one segment together; and few rows
        that read around tokens that are replaced. More rows than sequences are those of
        questions."""
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
        """Capture steps like that, unless they are."""
        if key not in self._graphs:
            self._graphs[key] = self._capture(key, [None])

    def _usual_key(self, num_rows: int, kind: Kind, entries: int) -> GraphKey | None:
        """What steps of such rows with a list for so many entries are replayed by, if any are."""
        rows = _example_rows(num_rows, kind, self.attention.pool.page_size)
        step = self.attention.host_step(rows, (), num_rows)
        assert step is not None, "a step of decode rows only is all work list"
        key = _key_of(num_rows, *step.works[0])
        whole = any(tile.whole for tile in key.tiles)
        # rows of one state have no more of them in any step
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

    def _load(self, rows: RowInputs) -> None:
        """Bring the rows to the device; those that pad have slot -1."""
        staged = torch.zeros(self._inputs.shape, dtype=torch.int64)
        staged[1] = -1
        staged[:3, : rows.num_rows] = torch.from_numpy(rows.table)
        if rows.wanted is None:
            staged[3, : rows.num_rows] = torch.arange(rows.num_rows)
        else:
            staged[3, : len(rows.wanted)] = torch.tensor(rows.wanted, dtype=torch.int64)
        self._inputs.copy_(to_device(staged, self._inputs.device))

    def _capture(self, key: GraphKey, choices: Sequence[HostChoice | None]) -> _Graph:
        device = self.model.device
        lists = [_lists(*work, device) for work in zip(key.works, choices, strict=True)]
        hosted = self.attention.hosted_room(key.rows) if key.hosted else None
        # a first run compiles kernels and makes what must not be made in a capture; it has no rows
        self._inputs.zero_()
        self._inputs[1].fill_(-1)
        side = torch.cuda.Stream(self.model.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._forward(key, lists, hosted)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # threads of the tiers may wait for the device meanwhile
        with undisturbed(), torch.cuda.graph(graph, self._pool, None, "thread_local"):
            logits = self._forward(key, lists, hosted)
        return _Graph(graph, lists, logits)

    def _forward(self, key: GraphKey, lists: Sequence[_Lists], hosted: DeviceWork | None) -> Tensor:
        tokens, slots, places, wanted = self._inputs[:, : key.rows].unbind(0)
        works = [(some.work.work, some.device) for some in lists]
        attend = self.attention.over(works, key.layers, slots, places, hosted)
        hidden = self.model.forward(arrived_tokens(tokens, self._previous), attend)
        return self.model.logits(hidden.index_select(0, wanted))


@contextmanager
def undisturbed() -> Iterator[None]:
    """Nothing is collected meanwhile: a graph that nobody holds any more must not be freed in the
    middle of a capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _key_of(num_rows: int, work: HostWork, choice: HostChoice | None) -> WorkKey:
    capacity = WorkCapacity(
        padded_rows(num_rows),
        room_for(work.num_items, 512, 8),
        room_for(work.num_entries, _ENTRIES[padded_rows(num_rows) > _FEW_LISTED], 8),
        room_for(work.num_pages, 8192, 4),
        room_for(work.num_mask_words, 1024, 8) if work.num_mask_words else 0,
    )
    return WorkKey(capacity, work.tiles, () if choice is None else choice.key)


def _lists(key: WorkKey, choice: HostChoice | None, device: torch.device) -> _Lists:
    work = WorkBuffer(key.capacity, key.tiles, device)
    if choice is None:
        return _Lists(work, None, None)
    buffer = ChoiceBuffer(choice, device)
    return _Lists(work, buffer, DeviceChoice(work.work, buffer, choice.how, choice.kept))


def padded_sizes() -> list[int]:
    """The numbers of rows that graphs are captured for."""
    fine = range(_FINE, 8 * _FINE, _FINE)
    return [1, 2, 4, 8, *fine, *range(8 * _FINE, MAX_ROWS + 1, _COARSE)]


def padded_rows(num_rows: int) -> int:
    """The smallest number of rows with a graph that holds ``num_rows``."""
    return next(size for size in padded_sizes() if size >= num_rows)


def room_for(count: int, least: int, factor: int) -> int:
    """A capacity that holds ``count``: one of few, since each has graphs of its own."""
    capacity = least
    while capacity < count:
        capacity *= factor
    return capacity


def _example_rows(num_rows: int, kind: Kind, page_size: int) -> list[DecodeRow]:
    """Decode rows such as usual steps have; their pages are never read."""

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

"""Page selection on the device: top-k per layer into reserved items of the work list.

One policy chooses per step. Its pages are scored by products with their summaries, or by tensors of
the policy. Past rows of a revised output (RetroAttention) read the newest row's pages together with
it, except pages that they have seen, and keep their states."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from looseleaf.attention.buffers.pinned_buffer import PinnedBuffer
from looseleaf.attention.plan.lists import HostWork, IntArray, int32
from looseleaf.attention.select.attend_pages import SelectedRows
from looseleaf.attention.select.candidates import CandidateTable, RowCandidates, TableArrays
from looseleaf.attention.select.layer_reads import LayerReads, StepReads
from looseleaf.attention.select.policy import KeptOutputs
from looseleaf.attention.select.worklist_fill import ChosenShape, may_join, power_of_two, with_room
from looseleaf.attention.select.worklist_scores import Scored
from looseleaf.ops.dispatch import Implementation
from looseleaf.ops.merge_states import KeptStates
from looseleaf.ops.partial_attention.work_list import WorkList
from looseleaf.ops.select_pages import CandidateList, SeenPages, best_run, select_pages
from looseleaf.ops.store_kv import NewRows

# few sizes of room and spans, since each size needs its own CUDA graphs
_ROOM_STEP = 16
# 32-bit numbers between aligned addresses
_ALIGNED = 4


@dataclass(frozen=True)
class HostChoice:
    """The choice of one step on the host.

    ``table`` has the candidates of the choosing rows. ``numbers`` are the arrays of a
    `CandidateList` except its columns, and of `SeenPages` and `KeptStates` if states are ``kept``.
    ``uncounted`` are rows whose page counts only the device has; None if the host has them."""

    shape: ChosenShape
    how: Scored
    table: CandidateTable
    numbers: dict[str, IntArray]
    kept: KeptOutputs | None
    uncounted: SelectedRows | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """Identity of a layer's launches, apart from numbers in fixed-size buffers."""
        kept = () if self.kept is None else self.kept.key
        how = self.how
        return (self.shape, how.sink, id(how.summaries), how.worth, how.sources, *kept)

    @property
    def sizes(self) -> dict[str, int]:
        """The length of every array."""
        return {name: len(array) for name, array in self.numbers.items()}


class ListedWork(NamedTuple):
    """One work list of a step, and the choice that fills it on the device, if any."""

    work: HostWork
    choice: HostChoice | None


class HostStep(NamedTuple):
    """The ``works`` of a step on the host, the index of each layer's work list, and the step's
    reads."""

    works: tuple[ListedWork, ...]
    layers: tuple[int, ...]
    reads: StepReads


def count_on_device(layer_reads: Sequence[LayerReads]) -> None:
    """Tally the pages chosen on the device, once for all layers with equal reads."""
    for reads in {id(reads): reads for reads in layer_reads}.values():
        if reads.listed is not None:
            _count(reads.listed, [n for n, other in enumerate(layer_reads) if other is reads])


def _count(rows: SelectedRows, layers: Sequence[int]) -> None:
    """Tally the newest rows' limits and newly sealed pages for ``layers``; rereads of past rows are
    among them."""
    candidates, policy = rows.candidates, rows.policy
    limits = candidates.leading.host.limits[layers].sum(0, dtype=np.int64)
    pages = np.zeros(len(candidates.rows), np.int64)
    if not policy.counts_on_device:
        pages[: len(limits)] = limits
    if policy.kept is not None:
        new = policy.kept.newly_sealed(candidates.rows)[: len(limits)]
        pages[: len(limits)] += len(layers) * np.array(new, np.int64)
    worth, kv = policy.worth, candidates.pool.kv
    looked = 0 if worth is None else worth.looked(candidates.pool.page_size, kv.shape[5])
    choosing = sum(candidates.sources[layer] == layer for layer in layers)
    rows.count(torch.from_numpy(pages * candidates.num_kv_heads), looked, choosing)


def choose_in(
    work: HostWork, selected: SelectedRows, group: int, num_rows: int, *, padded: bool = False
) -> tuple[HostWork, HostChoice]:
    """``work`` with room for the chosen pages of ``selected``, and the choice.

    A KV head has ``group`` query heads. Row arrays have ``num_rows`` entries. ``padded`` rounds
    the number of outputs up, for graphs."""
    policy, candidates = selected.policy, selected.candidates
    assert policy.listed_budget is not None, "the policy selects by no device list"
    sink, recent = policy.listed_budget
    rows, kept, newly_sealed = int32(selected.indices)[:, None], policy.kept, 0
    if kept is not None:
        rows = kept.by_output(candidates.rows, selected.indices)
        newly_sealed = max(kept.newly_sealed(candidates.rows))
    host = candidates.leading.host
    outputs = power_of_two(len(rows)) if padded else len(rows)
    room = -(-(int(host.limits.max()) + newly_sealed) // _ROOM_STEP) * _ROOM_STEP
    if policy.counts_on_device:
        # a mass budget's limit may be all pages, which grow
        room = power_of_two(room)
    shape = ChosenShape(
        outputs, rows.shape[1], candidates.num_kv_heads, group,
        most=max(1024, power_of_two(host.columns.shape[2])),
        most_spans=power_of_two(candidates.leading.most_spans),
        room=room, page_size=candidates.pool.page_size,
    )  # fmt: skip
    rows = np.concatenate([rows, np.full((outputs - len(rows), rows.shape[1]), -1, np.int32)])
    numbers = _numbers(host, shape, recent)
    numbers["row"] = rows[:, 0]
    joined = may_join(work) and len(selected.indices) == work.num_rows
    words = work.num_mask_words
    if len(host.mask_words):
        both = np.concatenate([work.arrays["mask_words"], host.mask_words]).astype(np.int32)
        work = HostWork({**work.arrays, "mask_words": both}, work.tiles)
        numbers["span_mask"] += np.where(numbers["span_mask"] >= 0, words, 0).astype(np.int32)
    work, chosen_from = with_room(work, rows, shape, joined=joined)
    if kept is not None:
        kept.make_room(shape.most)
        numbers |= kept.numbers(
            candidates.rows, selected.indices, chosen_from, outputs=outputs, num_rows=num_rows
        )
    uncounted = selected if policy.counts_on_device else None
    how = Scored.of(policy, candidates, sink)
    return work, HostChoice(shape, how, candidates.leading, numbers, kept, uncounted)


def _numbers(host: TableArrays, shape: ChosenShape, recent: int) -> dict[str, IntArray]:
    """The small arrays of the newest rows' candidates."""
    num_rows, outputs, most_spans = len(host.num_pages), shape.outputs, shape.most_spans

    def padded(values: IntArray) -> IntArray:
        return np.append(values, np.zeros(outputs - num_rows, np.int32)).astype(np.int32)

    first = np.searchsorted(host.span_row, np.arange(num_rows))
    nth = np.arange(len(host.span_row)) - first[host.span_row]

    def of_spans(values: IntArray, other: int) -> IntArray:
        table = np.full((outputs, most_spans), other, np.int32)
        table[host.span_row, nth] = values
        return table.reshape(-1)

    return {
        "num_rows": int32([num_rows]),
        "num_pages": padded(host.num_pages),
        "limit": _of_layers(host.limits, outputs).reshape(-1),
        "first_recent": padded(host.num_pages - np.maximum(recent - host.num_other, 0)),
        "span_offset": of_spans(host.span_offset, 0),
        "span_bound": of_spans(host.span_bound, 0),
        "span_mask": of_spans(host.span_mask, -1),
    }


def _of_layers(values: IntArray, outputs: int) -> IntArray:
    """``values`` ``[layers, rows]``, padded so that each layer begins at an aligned address."""
    width = -(-outputs // _ALIGNED) * _ALIGNED
    table = np.zeros((len(values), width), np.int32)
    table[:, : values.shape[1]] = values
    return table


class ChoiceBuffer:
    """The numbers of choices of one shape, at fixed device addresses."""

    def __init__(self, choice: HostChoice, device: torch.device) -> None:
        self.shape = shape = choice.shape
        self._numbers = PinnedBuffer(choice.sizes, device, sides=2)
        self._columns = torch.zeros(3, shape.outputs, shape.most, dtype=torch.int32, device=device)
        self._rows: list[RowCandidates] = []
        spans = (shape.outputs, shape.most_spans)
        arrays = dict(self._numbers.tensors)
        of_windows = {name: arrays.pop(name) for name in _OF_WINDOWS if name in arrays}
        of_spans = {name: arrays.pop(name).view(spans) for name in _OF_SPANS}
        self._limits = arrays.pop("limit").unflatten(0, (len(choice.how.rules), -1))
        arrays["limit"] = self._limits[0, : shape.outputs]
        pages, starts, nth = self._columns
        columns = {"pages": pages, "starts": starts, "spans": nth}
        self.listed = CandidateList(**arrays, **of_spans, **columns, sink=choice.how.sink)
        self.windows = of_windows
        if "kept_at" in of_windows:
            # no row keeps a state before the first load
            of_windows["kept_at"].fill_(-1)
        room = shape.num_pages if choice.kept else 0
        self.seen = torch.zeros(room, dtype=torch.int32, device=device)
        # pages read, by layer and row of the choice, where only the device counts them
        counted = len(choice.how.rules) if choice.uncounted is not None else 0
        self.counts = torch.zeros(counted, shape.rows, dtype=torch.int64, device=device)

    def layer_list(self, layer: int) -> CandidateList:
        """The candidate list with the limits of ``layer``."""
        return replace(self.listed, limit=self._limits[layer, : self.shape.outputs])

    def load(self, choice: HostChoice) -> None:
        """Copy the numbers of a step to the device, and the columns of changed rows."""
        self._numbers.load(choice.numbers)
        self._numbers.send()
        rows, known = choice.table.rows, self._rows
        changed = [n for n, row in enumerate(rows) if n >= len(known) or known[n] is not row]
        if not changed:
            return
        self._rows = [*rows, *known[len(rows) :]]
        widest = max(rows[n].columns.shape[1] for n in changed)
        columns = np.zeros((3, len(changed), widest), np.int32)
        for column, n in enumerate(changed):
            columns[:, column, : rows[n].columns.shape[1]] = rows[n].columns
        host_columns = torch.from_numpy(columns)
        index = torch.tensor(changed)
        if self._columns.is_cuda:
            host_columns, index = host_columns.pin_memory(), index.pin_memory()
        device = self._columns.device
        index = index.to(device, non_blocking=True)
        self._columns[:, index, :widest] = host_columns.to(device, non_blocking=True)


_OF_SPANS = ("span_offset", "span_bound", "span_mask")
_OF_WINDOWS = ("slot", "newly_sealed", "kept_from", "kept_at", "kept_fresh")


@dataclass(frozen=True)
class DeviceChoice:
    """Fills the reserved items of ``work`` in every layer; ``states`` are kept states, if any."""

    work: WorkList
    buffer: ChoiceBuffer
    how: Scored
    states: KeptOutputs | None

    @property
    def filled(self) -> WorkList:
        """The work list, with the seen-sets of past rows."""
        return self.work if self.states is None else replace(self.work, page_seen=self.buffer.seen)

    def fill(
        self, layer: int, q: Tensor, new: NewRows | None, implementation: Implementation
    ) -> None:
        """Choose for ``layer``, whose unrotated queries are ``q``, and store ``new`` rows.

        A layer that reads the choice of an earlier one finds it in the list."""
        source = self.how.sources[layer]
        if source != layer:
            if new is not None:
                new.store(self.how.rotations[layer], implementation)
            if len(self.buffer.counts):
                self.buffer.counts[layer] = self.buffer.counts[source]
            return
        listed, shape = self.buffer.layer_list(layer), self.buffer.shape
        run = best_run(shape.most, shape.room)
        positions = self.work.row_positions
        scores = self.how.pages(layer, q, listed, positions, run, new, implementation)
        counts = self.buffer.counts
        if len(counts):
            chosen = (scores.each > -torch.inf).sum(-1).clamp_max(listed.limit[:, None]).sum(-1)
            counts[layer, : len(chosen)] = chosen
        select_pages(scores, listed, shape.chosen(self.work), self._seen(layer), implementation)

    def tally(self, choice: HostChoice) -> None:
        """Append the page counts of the step just launched to the tallies of ``choice``."""
        if choice.uncounted is not None:
            pages = self.buffer.counts.sum(0)
            choice.uncounted.tallies.append(pages[: len(choice.uncounted.indices)])

    def kept(self, layer: int) -> KeptStates | None:
        """The states that the merge of ``layer`` continues and keeps."""
        return None if self.states is None else self.states.of_layer(layer, self.buffer.windows)

    def _seen(self, layer: int) -> SeenPages | None:
        if self.states is None:
            return None
        return self.states.seen(layer, self.buffer.windows, self.buffer.seen)

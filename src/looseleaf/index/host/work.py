"""A step's reads of host-resident segments as work of C threads: queries in, states out.

Everything except the queries is set before the step: the rows, their segments and positions. So a
layer is one call without Python, by a CUDA stream between two copies, or by a CPU thread."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from looseleaf.index.host.attend import HostedCounters, HostedRead
from looseleaf.index.host.segment import HostedSegment
from looseleaf.index.host.window import HostedWindow, WindowRow
from looseleaf.index.host_threads import HostThreads, Part, set_parts
from looseleaf.index.keys import KeyVectors
from looseleaf.index.native import KEY_TYPES
from looseleaf.index.reads import READ, WALKED, WINDOW, HeadKeys, HeadTable, ReadTask
from looseleaf.types import AttnState, Rotation, ScoreRule


class PlaceTables:
    """C tables of segments by layer, built at a row's first read, dropped with the segment."""

    def __init__(self, num_qo_heads: int) -> None:
        self._num_qo_heads = num_qo_heads
        self._tables: WeakKeyDictionary[HostedSegment, dict[tuple[int, bool], HeadTable]]
        self._tables = WeakKeyDictionary()

    def at(self, read: HostedRead, layer: int) -> tuple[HeadTable, bool]:
        """The table for ``read`` in ``layer``, and whether it searches an index."""
        index = read.index_at(layer)
        searches = index is not None and len(index.indexed) > 0
        tables = self._tables.setdefault(read.segment, {})
        if (layer, searches) not in tables:
            build = self._searched if searches else self._whole
            tables[layer, searches] = build(read.segment, layer)
        return tables[layer, searches], searches

    def _whole(self, segment: HostedSegment, layer: int) -> HeadTable:
        kv = segment.kv[layer]
        group = self._num_qo_heads // kv.shape[1]
        pairs = [
            tuple(KeyVectors(kv[plane, head], kv.shape[2]) for plane in (0, -1))
            for head in range(kv.shape[1])
        ]
        heads = [HeadKeys(None, None, (k, v)) for k, v in pairs for _ in range(group)]
        return HeadTable(heads)

    def _searched(self, segment: HostedSegment, layer: int) -> HeadTable:
        index, kv = segment.index, segment.kv[layer]
        assert index is not None
        tokens, group = index.indexed, self._num_qo_heads // kv.shape[1]
        heads = []
        for head in range(self._num_qo_heads):
            if head % group == 0:
                ends = torch.cat((kv[:, head // group, : tokens.start],
                                  kv[:, head // group, tokens.stop :]), 1)  # fmt: skip
                sides = [KeyVectors(part.clone(), ends.shape[1]) for part in ends]
                k, v = sides[0], sides[-1]
            values = segment.values(layer, head // group)
            heads.append(HeadKeys(index.at(layer, head), values, (k, v)))
        return HeadTable(heads)


class _LayerTask(NamedTuple):
    """One part of a layer: its C task, its reads, their numbers among all reads, and the windows of
    their rows, if any."""

    task: ReadTask
    reads: np.ndarray
    numbers: list[int]
    windows: np.ndarray | None


class _Members(NamedTuple):
    """The window of a newest row, and its rows in the step, newest first."""

    window: HostedWindow
    rows: np.ndarray


class HostedWork:
    """Buffers for the reads of up to ``rows`` rows, and the C work of each layer.

    The caller writes a layer's unrotated queries to ``q`` ``[rows, qo_heads, head_dim]``. After the
    layer ``states`` has fp32 outputs, then their lse, flat: one state a row, with lse -inf and an
    undefined output for a row without reads. All layers use the same buffers, in turn."""

    def __init__(
        self,
        crew: HostThreads,
        tables: PlaceTables,
        rotations: Sequence[Rotation],
        rules: Sequence[ScoreRule],
        q: Tensor,
    ) -> None:
        rows, heads, dim = q.shape
        self.crew, self.q, self._rules, self._rotations = crew, q, rules, rotations
        self.states = torch.zeros(rows * heads * (dim + 1), pin_memory=q.is_pinned())
        out = rows * heads * dim
        self._lse = self.states.data_ptr() + 4 * out
        self.layers = crew.layers(len(rules), self._lse, rows * heads)
        self._tables = tables
        self._tasks: list[_LayerTask] = []
        self._kept: list[object] = []
        self._loaded: list[HostedRead] = []
        self._rows: list[int] = []
        # keyed by the newest row
        self._members: dict[int, _Members] = {}

    def load(
        self,
        positions: Sequence[int],
        reads: Sequence[Sequence[HostedRead]],
        sampled: tuple[int, int] | None = None,
        windows: Sequence[WindowRow | None] = (),
    ) -> None:
        """Set the reads of row i to ``reads[i]``, at ``positions[i]``; no layer may run meanwhile.

        ``sampled`` is a layer and a unit whose recall is measured. In ``windows`` past rows read
        the keys of their newest row."""
        members = _members(windows)
        past = {int(row) for member in members.values() for row in member.rows[1:]}
        flat = [
            (row, read) for row, several in enumerate(reads) if row not in past for read in several
        ]
        same = len(flat) == len(self._loaded) and all(
            row == was and read is known
            for (row, read), was, known in zip(flat, self._rows, self._loaded, strict=True)
        )
        if not (same and _same(members, self._members)):
            self._rows, self._loaded = [row for row, _ in flat], [read for _, read in flat]
            self._tasks, self._kept, self._members = [], [], members
            for layer in range(len(self._rules)):
                self._set_layer(layer)
        frame_positions = np.array(
            [positions[row] - read.offset for row, read in flat], dtype=np.int64
        )
        row_positions = np.array([positions[row] for row, _ in flat], dtype=np.int64)
        for task, own, numbers, table in self._tasks:
            own["position"] = frame_positions[numbers]
            if table is not None:
                table["position"] = row_positions[numbers][_starts(own["row"])[:-1]]
            task.sampled = -1
        if sampled is not None and self._tasks:
            task = self._tasks[sampled[0] % len(self._tasks)].task
            task.sampled = sampled[1] % self.q.shape[1]

    def parts(self, states: Tensor | None = None) -> AttnState:
        """The states of all rows: views of this buffer, which the next layer overwrites, or of a
        copy ``states``."""
        rows, heads, dim = self.q.shape
        flat = self.states if states is None else states
        out, lse = flat.split([rows * heads * dim, rows * heads])
        return AttnState(out.view(rows, heads, dim), lse.view(rows, heads))

    def holds(self, segment: HostedSegment) -> bool:
        """Whether the loaded reads include ``segment``, which they keep alive."""
        return any(read.segment is segment for read in self._loaded)

    def run(self, layer: int) -> None:
        """Run a layer on the CPU; the queries must be written."""
        self.crew.run(self.layers[layer])

    def collect(self, counters: HostedCounters) -> None:
        """Add the layers' counts since the last call to ``counters``."""
        heads = self.q.shape[1]
        for task, own, _, _ in self._tasks:
            before, read, scanned, exact, returned = task.counts
            counters.reads += heads * len(own) if before else 0
            counters.keys += before
            counters.keys_read += read
            counters.keys_scanned += scanned
            if exact:
                counters.sampled += 1
                counters.recall_sum += returned / exact
            task.counts = (ctypes.c_int64 * 5)()

    def _set_layer(self, layer: int) -> None:
        by_unit: dict[int, list[int]] = {}
        tables = [self._tables.at(read, layer) for read in self._loaded]
        for number, (places, _) in enumerate(tables):
            together = self._rows[number] in self._members
            unit = places.window_unit if together else places.unit
            by_unit.setdefault(unit, []).append(number)
        parts = []
        for unit, numbers in by_unit.items():
            together = self._rows[numbers[0]] in self._members
            own = np.zeros(len(numbers), dtype=READ)
            own["row"] = [self._rows[n] for n in numbers]
            own["want"] = [self._loaded[n].count_at(layer) for n in numbers]
            own["heads"] = [tables[n][0].address for n in numbers]
            starts = _starts(own["row"])
            windows = self._windows(layer, unit, own, numbers, starts)
            task = self._task(layer, own, starts, windows)
            self._tasks.append(_LayerTask(task, own, numbers, windows))
            self._kept.append(starts)
            # rows without a window walk first, then read
            units = task.pairs if together else 2 * task.pairs
            parts.append(Part(unit, ctypes.addressof(task), units))
        self._kept.append(set_parts(self.layers[layer], parts))

    def _windows(
        self, layer: int, unit: int, own: np.ndarray, numbers: Sequence[int], starts: np.ndarray
    ) -> np.ndarray | None:
        """The windows of the rows of ``own``; writes the address of its results to each read."""
        if own["row"][0] not in self._members:
            return None
        records = np.zeros(len(starts) - 1, dtype=WINDOW)
        for n, first in enumerate(starts[:-1]):
            window, rows = self._members[int(own["row"][first])]
            records[n] = window.record(layer, unit, rows)
        for n, number in enumerate(numbers):
            row, read = self._rows[number], self._loaded[number]
            # the window identifies a read by its rank among the row's reads
            rank = self._rows[:number].count(row)
            index = read.index_at(layer)
            if index is not None:
                window = self._members[row].window
                own["found"][n] = window.found(rank, layer, read.most, len(index.indexed))
        return records

    def _task(
        self, layer: int, reads: np.ndarray, starts: np.ndarray, windows: np.ndarray | None
    ) -> ReadTask:
        rotation, heads = self._rotations[layer], self.q.shape[1]
        pairs = (len(starts) - 1) * heads
        walked = np.zeros((len(reads), heads), dtype=WALKED)
        ready = np.zeros(pairs, dtype=np.int32)
        task = ReadTask(
            q=self.q.data_ptr(),
            q_type=KEY_TYPES[self.q.dtype],
            heads=heads,
            cos=rotation.cos.data_ptr(),
            sin=rotation.sin.data_ptr(),
            half=rotation.rotary_dim // 2,
            interleaved=rotation.interleaved,
            reads=reads.ctypes.data,
            starts=starts.ctypes.data,
            scale=self._rules[layer].softmax_scale,
            sampled=-1,
            out=self.states.data_ptr(),
            lse=self._lse,
            windows=None if windows is None else windows.ctypes.data,
            pairs=pairs,
            walked=walked.ctypes.data,
            ready=ready.ctypes.data,
        )
        self._kept += [walked, ready]
        return task


def _members(windows: Sequence[WindowRow | None]) -> dict[int, _Members]:
    """The windows of a step by their newest row."""
    rows: dict[HostedWindow, dict[int, int]] = {}
    for number, window_row in enumerate(windows):
        if window_row is not None:
            rows.setdefault(window_row.window, {})[window_row.age] = number
    members = {}
    for window, by_age in rows.items():
        in_order = np.array([by_age[age] for age in range(len(by_age))], dtype=np.int64)
        members[by_age[0]] = _Members(window, in_order)
    return members


def _same(first: dict[int, _Members], second: dict[int, _Members]) -> bool:
    """Whether both have the same windows with the same rows."""
    return first.keys() == second.keys() and all(
        members.window is second[row].window and np.array_equal(members.rows, second[row].rows)
        for row, members in first.items()
    )


def _starts(rows: np.ndarray) -> np.ndarray:
    """The first index of each row's reads, and the end of all."""
    return np.flatnonzero(np.diff(rows, prepend=-1, append=-1)).astype(np.int64)

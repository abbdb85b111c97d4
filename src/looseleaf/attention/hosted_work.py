"""A step's reads of hosted segments as work for threads in C: the queries come, the states go.

Everything but the queries is known before the step: which rows read which segments where. So a
layer is one call without Python, made by whoever has the queries: a CUDA stream, between two
copies."""

import ctypes
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from looseleaf.attention.hosted import HostedCounters, HostedRead
from looseleaf.index.crew import Crew, Part, set_parts
from looseleaf.index.keys import KeyVectors
from looseleaf.index.reads import READ, HeadKeys, ReadPlaces, ReadTask, row_type
from looseleaf.kv.hosted import HostedSegment
from looseleaf.types import Rotation, ScoreRule


class PlaceTables:
    """The tables of segments by layer, made when a row first reads them, gone with the segment."""

    def __init__(self, num_qo_heads: int) -> None:
        self._num_qo_heads = num_qo_heads
        self._made: WeakKeyDictionary[HostedSegment, dict[tuple[int, bool], ReadPlaces]]
        self._made = WeakKeyDictionary()

    def at(self, read: HostedRead, layer: int) -> tuple[ReadPlaces, bool]:
        """The table that ``read`` uses in ``layer``, and whether it searches an index."""
        index = read.index_at(layer)
        searches = index is not None and len(index.indexed) > 0
        made = self._made.setdefault(read.segment, {})
        if (layer, searches) not in made:
            make = self._searched if searches else self._whole
            made[layer, searches] = make(read.segment, layer)
        return made[layer, searches], searches

    def _whole(self, segment: HostedSegment, layer: int) -> ReadPlaces:
        kv = segment.kv[layer]
        group = self._num_qo_heads // kv.shape[1]
        pairs = [
            tuple(KeyVectors(kv[which, head], kv.shape[2]) for which in range(2))
            for head in range(kv.shape[1])
        ]
        heads = [HeadKeys(None, None, (k, v)) for k, v in pairs for _ in range(group)]
        return ReadPlaces(heads)

    def _searched(self, segment: HostedSegment, layer: int) -> ReadPlaces:
        index, kv = segment.index, segment.kv[layer]
        assert index is not None
        tokens, group = index.indexed, self._num_qo_heads // kv.shape[1]
        heads = []
        for head in range(self._num_qo_heads):
            if head % group == 0:
                ends = torch.cat((kv[:, head // group, : tokens.start],
                                  kv[:, head // group, tokens.stop :]), 1)  # fmt: skip
                k, v = (KeyVectors(part.clone(), ends.shape[1]) for part in ends)
            values = segment.values(layer, head // group)
            heads.append(HeadKeys(index.at(layer, head), values, (k, v)))
        return ReadPlaces(heads)


class HostedWork:
    """Room for the reads of up to ``rows`` rows, and what C does with them layer by layer.

    ``q`` ``[rows, qo_heads, head_dim]`` is where a layer's unrotated queries must be before it
    runs, ``states`` has its fp32 outputs and then its lse, flat, afterwards: one state a row,
    with lse -inf, and any output, for a row without reads. One object serves all layers, one after
    the other."""

    def __init__(
        self,
        crew: Crew,
        tables: PlaceTables,
        rotation: Rotation,
        rules: Sequence[ScoreRule],
        q: Tensor,
    ) -> None:
        rows, heads, dim = q.shape
        self.crew, self.q, self._rules, self._rotation = crew, q, rules, rotation
        self.states = torch.zeros(rows * heads * (dim + 1), pin_memory=q.is_pinned())
        out = rows * heads * dim
        self._lse = self.states.data_ptr() + 4 * out
        self.layers = crew.layers(len(rules), self._lse, rows * heads)
        self._tables = tables
        self._tasks: list[tuple[ReadTask, np.ndarray, list[int]]] = []
        self._kept: list[object] = []
        self._loaded: list[HostedRead] = []
        self._rows: list[int] = []

    def load(
        self,
        positions: Sequence[int],
        reads: Sequence[Sequence[HostedRead]],
        sampled: tuple[int, int] | None = None,
    ) -> None:
        """What row i reads at ``positions[i]``; layers must not run meanwhile.

        ``sampled`` is a layer and a number: so many units further on recall is measured."""
        flat = [(row, read) for row, several in enumerate(reads) for read in several]
        same = len(flat) == len(self._loaded) and all(
            row == was and read is known
            for (row, read), was, known in zip(flat, self._rows, self._loaded, strict=True)
        )
        if not same:
            self._rows, self._loaded = [row for row, _ in flat], [read for _, read in flat]
            self._tasks, self._kept = [], []
            for layer in range(len(self._rules)):
                self._set_layer(layer)
        places = np.array([positions[row] - read.offset for row, read in flat], dtype=np.int64)
        for task, own, numbers in self._tasks:
            own["place"] = places[numbers]
            task.sampled = -1
        if sampled is not None and self._tasks:
            task = self._tasks[sampled[0] % len(self._tasks)][0]
            task.sampled = sampled[1] % self.q.shape[1]

    def holds(self, segment: HostedSegment) -> bool:
        """Whether what was loaded reads ``segment``, which lives as long as it may be read."""
        return any(read.segment is segment for read in self._loaded)

    def run(self, layer: int) -> None:
        """Run a layer on the CPU, for queries that are there."""
        self.crew.run(self.layers[layer])

    def collect(self, counters: HostedCounters) -> None:
        """Add up what the layers have read since the last time."""
        heads = self.q.shape[1]
        for task, own, _ in self._tasks:
            before, read, scanned, wanted, found = task.counts
            counters.reads += heads * len(own) if before else 0
            counters.keys += before
            counters.keys_read += read
            counters.keys_scanned += scanned
            if wanted:
                counters.sampled += 1
                counters.recall_sum += found / wanted
            task.counts = (ctypes.c_int64 * 5)()

    def _set_layer(self, layer: int) -> None:
        by_unit: dict[int, list[int]] = {}
        tables = [self._tables.at(read, layer) for read in self._loaded]
        for number, (places, _) in enumerate(tables):
            by_unit.setdefault(places.unit, []).append(number)
        parts = []
        for unit, numbers in by_unit.items():
            own = np.zeros(len(numbers), dtype=READ)
            own["row"] = [self._rows[n] for n in numbers]
            own["want"] = [self._loaded[n].count for n in numbers]
            own["heads"] = [tables[n][0].address for n in numbers]
            starts = np.flatnonzero(np.diff(own["row"], prepend=-1, append=-1)).astype(np.int64)
            task = self._task(layer, own, starts)
            self._tasks.append((task, own, numbers))
            self._kept.append(starts)
            parts.append(Part(unit, ctypes.addressof(task), (len(starts) - 1) * self.q.shape[1]))
        self._kept.append(set_parts(self.layers[layer], parts))

    def _task(self, layer: int, reads: np.ndarray, starts: np.ndarray) -> ReadTask:
        rotation = self._rotation
        task = ReadTask(
            q=self.q.data_ptr(),
            q_type=row_type(self.q.dtype),
            heads=self.q.shape[1],
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
        )
        return task

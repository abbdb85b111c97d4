"""Scoring graphs: pass graphs that also measure the attention that stored keys receive."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.attention.buffers.span_buffer import SpanBuffer, SpanCapacity
from looseleaf.attention.plan.chunks import PrefillChunk, host_spans
from looseleaf.attention.plan.host_spans import HostSpans
from looseleaf.blend.watched import (
    WATCHED_ROWS,
    ChunkStep,
    Watch,
    WatchedStep,
    no_rows,
    watched_chunks,
)
from looseleaf.graphs.capture import Within
from looseleaf.graphs.decode import room_for
from looseleaf.graphs.prefill import MAX_ROWS, Pass, PassGraphs, capacity_for, padded_pass
from looseleaf.graphs.rows import IntArray, to_device
from looseleaf.kv.store import PendingLoad


@dataclass(frozen=True)
class _WatchKey:
    """The key of a watched pass: capacities of its rows and spans, of watched spans and keys, the
    watched layers, and the number of layers."""

    rows: SpanCapacity
    watched: SpanCapacity
    keys: int
    layers: tuple[int, ...]
    depth: int


@dataclass(frozen=True)
class _Watched:
    """A captured watched pass with the buffers of its watched spans and rows."""

    captured: Pass
    watched: SpanBuffer
    weight: Tensor
    before: Tensor


@dataclass(eq=False)
class ScoringGraphs(PassGraphs):
    """Pass graphs with the watched passes of token scoring."""

    _watching: dict[_WatchKey, _Watched] = field(default_factory=dict)

    @property
    def num_captured(self) -> int:
        """Passes captured so far."""
        return super().num_captured + len(self._watching)

    def clear(self) -> None:
        """Free all graphs; no pass may be in flight."""
        super().clear()
        self._watching.clear()

    def received(
        self,
        table: IntArray,
        chunks: Sequence[PrefillChunk],
        watch: Watch,
        depth: int,
        awaited: Sequence[PendingLoad],
    ) -> tuple[Float[Tensor, " keys"], float] | None:
        """The attention that keys receive in a watched pass, and the time of its launch.

        The rows of ``chunks``, with ``table`` as in `RowInputs`, pass the first ``depth`` layers.
        Returns None if no graph fits. Raises as `run` does."""
        if table.shape[1] > MAX_ROWS:
            return None
        key, spans, watched = self._watch_key(chunks, watch, depth)
        if not key.rows.holds(spans) or not key.watched.holds(watched):
            return None
        buffers = self._watched_for(key)
        captured = buffers.captured
        self._await_fetch()
        self._load(table, ())
        captured.buffer.load(spans)
        # unused spans need length 0, because blocks of keys are assigned by span
        lengths = np.zeros(key.watched.spans, dtype=np.int32)
        lengths[: watched.num_spans] = watched.arrays["span_length"]
        buffers.watched.load(watched._replace(arrays={**watched.arrays, "span_length": lengths}))
        numbers = torch.stack([watch.weight.float(), torch.tensor(watch.before).float()])
        weight, before = to_device(numbers, self.model.device)
        buffers.weight[: len(weight)].copy_(weight)
        buffers.before[: len(before)].copy_(before)
        launched = self._replay(captured, awaited)
        return captured.result[: watch.num_keys], launched

    def prepare_watched(self, chunks: Sequence[PrefillChunk], watch: Watch, depth: int) -> None:
        """Capture the graphs of a watched pass, unless they exist."""
        self._watched_for(self._watch_key(chunks, watch, depth)[0])

    def _watched_for(self, key: _WatchKey) -> _Watched:
        if key not in self._watching:
            self._watching[key] = self._capture_watched(key)
        return self._watching[key]

    def _watch_key(
        self, chunks: Sequence[PrefillChunk], watch: Watch, depth: int
    ) -> tuple[_WatchKey, HostSpans, HostSpans]:
        """The key of a watched pass, and its span lists."""
        spans = self.attention.planner.host_spans(chunks)
        watched = host_spans(watched_chunks(chunks, watch), WATCHED_ROWS)
        rows = capacity_for(spans, padded_pass(sum(len(chunk.positions) for chunk in chunks)))
        key = _WatchKey(
            rows,
            capacity_for(watched, rows.rows),
            room_for(watch.num_keys, 4096, 2),
            tuple(layer for layer in range(depth) if layer in watch.layers),
            depth,
        )
        return key, spans, watched

    def _capture_watched(self, key: _WatchKey) -> _Watched:
        device = self.model.device
        buffer, watched = SpanBuffer(key.rows, device), SpanBuffer(key.watched, device)
        weight = torch.zeros(key.rows.rows, dtype=torch.float32, device=device)
        before = torch.zeros(key.rows.rows, dtype=torch.int32, device=device)
        hook = None if key.depth == self.model.num_layers else no_rows

        def run(within: Within) -> Tensor:
            for numbers in (self._rows, buffer, watched):
                numbers.fetch()
            tokens, slots, places = self._rows.numbers[:3, : key.rows.rows].unbind(0)
            step = ChunkStep(self.attention, buffer.spans, slots, places)
            received = torch.zeros(key.keys, dtype=torch.float32, device=device)
            seen = WatchedStep(step, watched.spans, key.layers, weight, before, received)
            self.model.forward(tokens, within(seen), hook, hooked=(key.depth,))
            return seen.received

        return _Watched(self._cut(run, key.depth, buffer), watched, weight, before)

"""Pass graphs: CUDA graphs of passes of few new rows that blend or wait for loads.

On devices that read spans in parts, all steps without decode rows use them. A pass is several
graphs of consecutive layers (`looseleaf.graphs.capture`). As in `StepGraphs`, all that differs
between passes is data, which the first graph copies to the device."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from looseleaf.attention.buffers.span_buffer import SpanBuffer, SpanCapacity
from looseleaf.attention.paged import PagedAttention
from looseleaf.attention.plan.chunks import PrefillChunk
from looseleaf.attention.plan.host_spans import HostSpans
from looseleaf.graphs.capture import Captures, Replayable, Within, stretches
from looseleaf.graphs.decode import room_for
from looseleaf.graphs.layerwise import LateRows, wait_for_layer
from looseleaf.graphs.rows import IntArray, RowBuffer, RowInputs, to_device
from looseleaf.graphs.step_result import StepResult
from looseleaf.kv.store import PendingLoad
from looseleaf.models import Decoder
from looseleaf.ops.hopper import attention as hopper_attention

# the numbers of rows of graphs; cuBLAS takes longer for products of 448 rows than of 480
_FEW = (16, 32, 64, 96, 128, 144, 160, 192, 224, 256, 320, 384, 480, 512)
_MANY = (576, 640, 768, 896, 1024)
_PADDED = (*_FEW, *_MANY)
# past this the layers compute for longer than their launches take
MAX_ROWS = _PADDED[-1]


@dataclass(frozen=True)
class Pass:
    """A captured pass: ``graphs`` in order; each waits for the layer in ``stops`` of all loads.
    Replays write ``result``, such as logits."""

    result: Tensor
    graphs: Sequence[Replayable]
    stops: Sequence[int]
    buffer: SpanBuffer


class PassKey(NamedTuple):
    """The key of a pass: the capacities of its rows and spans, and the layer of its late rows."""

    rows: SpanCapacity
    enters: int | None


@dataclass(eq=False)
class PassGraphs:
    """The pass graphs of one model over one pool, captured at their first use."""

    model: Decoder
    attention: PagedAttention
    rehearsal: bool = False
    replays: int = 0
    _passes: dict[PassKey, Pass] = field(default_factory=dict)
    # recorded when the latest pass has copied its numbers; the host then writes the next ones
    _fetched: torch.cuda.Event | None = None

    def __post_init__(self) -> None:
        self._rows = RowBuffer(MAX_ROWS, self.model.device)
        self._captures = Captures(self.model.device, rehearsal=self.rehearsal)
        self._fetched = torch.cuda.Event()

    @property
    def num_captured(self) -> int:
        """Passes captured so far."""
        return len(self._passes)

    def clear(self) -> None:
        """Free all graphs; no pass may be in flight."""
        self._passes.clear()

    def sooner(self, chunks: Sequence[PrefillChunk]) -> bool:
        """Whether a step of plain ``chunks`` is faster as a pass than by a work list.

        Spans take the host and the device less time (docs/log.md)."""
        return self.has_units and self.attention.planner.by_work_list(chunks)

    def run(
        self,
        rows: RowInputs,
        chunks: Sequence[PrefillChunk],
        awaited: Sequence[PendingLoad],
        late_rows: Sequence[LateRows] = (),
    ) -> StepResult | None:
        """The result of a step of these chunks; None if no graph fits.

        All ``late_rows`` must enter at one layer. Each layer waits for that layer of the
        ``awaited`` loads, and the call raises their errors."""
        layers = list(dict.fromkeys(late.layer for late in late_rows))
        if len(layers) > 1:
            return None
        if rows.num_rows > MAX_ROWS or rows.logit_rows is None or any(c.hosted for c in chunks):
            return None
        spans = self.attention.planner.host_spans(chunks)
        capacity = capacity_for(spans, padded_pass(rows.num_rows))
        if not capacity.holds(spans):
            return None
        captured = self._pass_for(PassKey(capacity, layers[0] if layers else None))
        self._await_fetch()
        self._load(rows.table, rows.logit_rows, late_rows)
        captured.buffer.load(spans)
        launched = self._replay(captured, awaited)
        return StepResult.of_chunks(captured.result[: len(rows.logit_rows)], launched)

    def key_of(self, chunks: Sequence[PrefillChunk]) -> PassKey:
        """The key of a pass of ``chunks`` without late rows."""
        num_rows = sum(len(chunk.positions) for chunk in chunks)
        spans = self.attention.planner.host_spans(chunks)
        return PassKey(capacity_for(spans, padded_pass(num_rows)), None)

    def prepare(self, key: PassKey) -> None:
        """Capture the graphs of ``key``, unless they exist."""
        self._pass_for(key)

    def _pass_for(self, key: PassKey) -> Pass:
        if key not in self._passes:
            self._passes[key] = self._capture(key)
        return self._passes[key]

    def _replay(self, captured: Pass, awaited: Sequence[PendingLoad]) -> float:
        """Run a pass; returns the time of its first launch, on the clock `time.perf_counter`."""
        launched = time.perf_counter()
        for graph, stop in zip(captured.graphs, captured.stops, strict=True):
            wait_for_layer(awaited, stop)
            graph.replay()
            if graph is captured.graphs[0] and self._fetched is not None:
                self._fetched.record()
        self.replays += 1
        return launched

    def _await_fetch(self) -> None:
        if self._fetched is not None:
            self._fetched.synchronize()

    def _load(
        self, table: IntArray, logit_rows: Sequence[int], late_rows: Sequence[LateRows] = ()
    ) -> None:
        """Write the row table and the hidden states of late rows."""
        self._rows.load(table, logit_rows, [late.rows for late in late_rows])
        for late in late_rows:
            rows = to_device(torch.from_numpy(late.rows), self.model.device)
            self._late_states[rows] = late.hidden

    @cached_property
    def has_units(self) -> bool:
        """Whether every layer reads span lists by units."""
        k_pages = self.attention.pool.layer(0)[0]
        return all(hopper_attention.serves(k_pages, rule) for rule in self.attention.rules)

    @cached_property
    def _late_states(self) -> Tensor:
        """The hidden states of late rows; other rows are undefined."""
        size, model = (MAX_ROWS, self.model.state_size), self.model
        return torch.zeros(size, dtype=model.dtype, device=model.device)

    def _capture(self, key: PassKey) -> Pass:
        buffer = SpanBuffer(key.rows, self.model.device)

        def run(within: Within) -> Tensor:
            self._rows.fetch()
            buffer.fetch()
            return self._forward(buffer, key.enters, within)

        return self._cut(run, self.model.num_layers, buffer)

    def _cut(self, run: Callable[[Within], Tensor], depth: int, buffer: SpanBuffer) -> Pass:
        """Capture ``run``, a pass through the first ``depth`` layers, in pieces."""
        self._await_fetch()
        self._rows.clear()
        starts = stretches(depth)
        result, graphs = self._captures.capture(run, starts[1:])
        stops = [start - 1 for start in starts[1:]] + [depth - 1]
        return Pass(result, graphs, stops, buffer)

    def _forward(self, buffer: SpanBuffer, enters: int | None, within: Within) -> Tensor:
        tokens, slots, places, before = self._rows.numbers[:4, : buffer.capacity.rows].unbind(0)
        logit_rows = self._rows.numbers[4, : buffer.capacity.requests]
        if enters is None:
            attend = self.attention.over_spans(buffer.spans, slots, places)
            hidden = self.model.forward(tokens, within(attend))
            return self.model.logits(hidden.index_select(0, logit_rows))
        kept = before.clone()

        def enter(layer: int, hidden: Tensor) -> Tensor:
            kept.copy_(slots)
            return torch.where((before < 0)[:, None], self._late_states[: len(hidden)], hidden)

        attend = self.attention.over_spans(buffer.spans, kept, places)
        hidden = self.model.forward(tokens, within(attend), enter, hooked=(enters,))
        return self.model.logits(hidden.index_select(0, logit_rows))


def padded_pass(num_rows: int) -> int:
    return next(size for size in _PADDED if size >= num_rows)


def capacity_for(spans: HostSpans, rows: int) -> SpanCapacity:
    """A capacity for ``spans``: one of few, because each needs separate graphs."""
    words = spans.num_mask_words
    return SpanCapacity(
        rows,
        room_for(spans.num_tiles, 4, 2),
        room_for(spans.num_requests, 2, 4),
        room_for(spans.num_spans, 16, 4),
        room_for(spans.num_pages, 2048, 4),
        room_for(words, 1024, 4) if words else 0,
        spans.parts,
        room_for(spans.num_units, 16, 2) if spans.num_units else 0,
        room_for(spans.num_states, 1024, 2) if spans.num_states else 0,
        room_for(spans.num_gathered, 4096, 2) if spans.num_gathered else 0,
        spans.groups,
    )

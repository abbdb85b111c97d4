"""APE attention (arXiv 2502.05431, section 3): rows attend to text and documents separately.

Scores of the documents are divided by a temperature. Their log-sum-exp is multiplied by a scale,
and both states are merged. With temperature and scale 1 this equals attention over the union.
Decode rows use span lists too."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from looseleaf.attention.paged import PagedAttention
from looseleaf.attention.plan.chunks import PrefillChunk, make_span_list
from looseleaf.attention.plan.groups import DecodeRow, ReadSpan
from looseleaf.attention.query_scales import scaled
from looseleaf.config import Fuse
from looseleaf.ops.add_sinks import add_sinks
from looseleaf.ops.dispatch import Implementation
from looseleaf.ops.merge_states import merge_states
from looseleaf.ops.prefill_attention import prefill_attention
from looseleaf.ops.prefill_attention.span_list import SpanList
from looseleaf.prompt.feature import Feature, FeatureRows
from looseleaf.types import Attend, AttnState, ScoreRule


@dataclass(frozen=True)
class Apart:
    """APE ``rows`` of a step: ``own`` are the reads of their text, ``other`` the document spans."""

    rows: range
    own: PrefillChunk
    other: tuple[ReadSpan, ...]
    temperature: float
    scale: float


@dataclass(frozen=True)
class _Read:
    rows: Tensor
    own: SpanList
    other: SpanList
    temperature: float
    scale: float
    query_scales: Tensor | None


class ApartStep:
    """The attention of a step with APE rows.

    ``step`` writes all keys and computes all other rows. ``last_rows`` are the rows of the last
    layer, as in `StepRows.logit_rows`."""

    def __init__(
        self,
        owner: PagedAttention,
        step: Attend,
        apart: Sequence[Apart],
        last_rows: Sequence[int] | None,
    ) -> None:
        self._owner, self._step = owner, step
        reads = [self._read(ape, list(ape.rows), list(ape.rows)) for ape in apart]
        self._reads = [reads] * len(owner.rules)
        if last_rows is not None:
            index_of = {row: index for index, row in enumerate(last_rows)}
            last_layer = [(ape, [row for row in ape.rows if row in index_of]) for ape in apart]
            self._reads[-1] = [
                self._read(ape, rows, [index_of[row] for row in rows])
                for ape, rows in last_layer
                if rows
            ]

    def __call__(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        out = self._step(layer, q, k, v)
        for read in self._reads[layer]:
            queries = scaled(q.index_select(0, read.rows), read.query_scales)
            out[read.rows] = self._merged(layer, queries, read).to(out.dtype)
        return out

    def _merged(self, layer: int, q: Tensor, read: _Read) -> Tensor:
        owner = self._owner
        rule = owner.rules[layer]
        tempered = replace(rule, softmax_scale=rule.softmax_scale / read.temperature)
        own = self._attend(layer, q, read.own, rule)
        other = self._attend(layer, q, read.other, tempered)
        states = AttnState(
            torch.stack((own.out, other.out), 1).flatten(0, 1),
            torch.stack((own.lse, other.lse * read.scale), 1).flatten(0, 1),
        )
        indptr = torch.arange(0, 2 * len(q) + 1, 2, dtype=torch.int32, device=q.device)
        merged = merge_states(states, indptr, implementation=self._implementation)
        if rule.sinks is not None:
            add_sinks(merged, rule.sinks, self._implementation)
        return merged.out

    def _attend(self, layer: int, q: Tensor, spans: SpanList, rule: ScoreRule) -> AttnState:
        owner = self._owner
        pages, rotation = owner.pool.layer(layer), owner.rotations[layer]
        return prefill_attention(
            q, *pages, spans, rotation, rule, implementation=self._implementation
        )

    @property
    def _implementation(self) -> Implementation:
        """The owner's implementation; ``cpu`` for ``native``, which has neither operator."""
        chosen = self._owner.implementation
        return "cpu" if chosen == "native" else chosen

    def _read(self, ape: Apart, rows: Sequence[int], query_rows: Sequence[int]) -> _Read:
        device, tile_rows = self._owner.pool.kv.device, self._owner.planner.tile_rows
        positions = [ape.own.positions[row - ape.rows.start] for row in rows]

        def over(spans: tuple[ReadSpan, ...]) -> SpanList:
            chunk = PrefillChunk(positions, spans)
            return make_span_list([chunk], tile_rows=tile_rows, device=device)

        index = torch.tensor(query_rows, dtype=torch.int64, device=device)
        scales = self._owner.scales_at(torch.tensor(positions, device=device))
        return _Read(
            index, over(ape.own.spans), over(ape.other), ape.temperature, ape.scale, scales
        )


@dataclass(frozen=True)
class ApeRows(Feature):
    """An output attends to its documents with the temperature and scale of ``fuse``."""

    replays = False
    attention: PagedAttention
    fuse: Fuse

    def wrap(self, attend: Attend, rows: FeatureRows, last_rows: Sequence[int] | None) -> Attend:
        own = rows.read
        if isinstance(own, DecodeRow):
            own = PrefillChunk([own.position], (*own.settled, own.tail))
        elif not rows.in_tail:
            return attend
        documents, fuse = rows.sequence.spans_apart(), self.fuse
        apart = Apart(rows.rows, own, documents, fuse.temperature, fuse.scale)
        return ApartStep(self.attention, attend, [apart], last_rows)

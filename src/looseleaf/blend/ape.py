"""Rows that read two sets of keys apart: the attention over each, one of them tempered and scaled,
then the merge (APE, arXiv 2502.05431, section 3).

The scores of the ``other`` set are divided by a temperature; its log-sum-exp, and so the logarithm
of its share, is multiplied by a scale. With both at 1 it is attention over the union. The operators
are those that read everything else; such rows are read by span list, also when they decode."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from looseleaf.attention.paged import PagedAttention
from looseleaf.attention.plan.chunks import PrefillChunk, make_span_list
from looseleaf.attention.plan.groups import ReadSpan
from looseleaf.ops.dispatch import Implementation
from looseleaf.ops.merge_states import merge_states
from looseleaf.ops.prefill_attention import prefill_attention
from looseleaf.ops.prefill_attention.span_list import SpanList
from looseleaf.types import Attend, AttnState, ScoreRule


@dataclass(frozen=True)
class Apart:
    """``rows`` of a step, as ``own`` reads its own keys, and the ``other`` spans that it reads."""

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


class ApartStep:
    """The attention of a step some of whose rows read apart.

    ``step`` writes all keys and answers the other rows. ``asked`` as in `StepRows`."""

    def __init__(
        self,
        owner: PagedAttention,
        step: Attend,
        apart: Sequence[Apart],
        asked: Sequence[int] | None,
    ) -> None:
        self._owner, self._step = owner, step
        every = [self._read(one, list(one.rows), list(one.rows)) for one in apart]
        self._reads = [every] * len(owner.rules)
        if asked is not None:
            places = {row: place for place, row in enumerate(asked)}
            kept = [(one, [row for row in one.rows if row in places]) for one in apart]
            self._reads[-1] = [
                self._read(one, rows, [places[row] for row in rows]) for one, rows in kept if rows
            ]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = self._step(layer, q, k, v)
        for read in self._reads[layer]:
            queries = q.index_select(0, read.rows)
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
        return merge_states(states, indptr, implementation=self._implementation).out

    def _attend(self, layer: int, q: Tensor, spans: SpanList, rule: ScoreRule) -> AttnState:
        owner = self._owner
        pages, rotation = owner.pool.layer(layer), owner.rotations[layer]
        return prefill_attention(
            q, *pages, spans, rotation, rule, implementation=self._implementation
        )

    @property
    def _implementation(self) -> Implementation:
        """The owner's, or the CPU's own where that has C kernels: neither operator has one."""
        chosen = self._owner.implementation
        return "cpu" if chosen == "native" else chosen

    def _read(self, one: Apart, rows: Sequence[int], places: Sequence[int]) -> _Read:
        device, tile_rows = self._owner.pool.kv.device, self._owner.planner.tile_rows
        positions = [one.own.positions[row - one.rows.start] for row in rows]

        def over(spans: tuple[ReadSpan, ...]) -> SpanList:
            chunk = PrefillChunk(positions, spans)
            return make_span_list([chunk], tile_rows=tile_rows, device=device)

        index = torch.tensor(places, dtype=torch.int64, device=device)
        return _Read(index, over(one.own.spans), over(one.other), one.temperature, one.scale)

"""Laws 1 to 3 on one layer's attention, with queries, keys and values of the checkpoint.

A dense pass over plain text provides these states. The engine's attention stores runs of them as
segments and reads them in other orders and at other offsets. A dense softmax over the same keys,
at their true positions, is the truth.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from looseleaf.attention.paged import PagedAttention, StepRows
from looseleaf.attention.plan.chunks import PrefillChunk
from looseleaf.attention.plan.groups import DecodeRow, ReadSpan
from looseleaf.attention.select.policy import PagePolicy, SelectingRow
from looseleaf.config import Select, SelectPolicy
from looseleaf.ops.add_sinks import add_sinks
from looseleaf.ops.merge_states import merge_states
from looseleaf.rope import query_scale
from looseleaf.sparse import make_policy
from looseleaf.types import Attend, AttnState
from looseleaf_lab.conformance.definition import SHIFTS, HeadStates, wider
from looseleaf_lab.conformance.subject import Subject
from looseleaf_lab.conformance.verdict import Comparison, Finding, largest

# the order in which each row reads the segments; one row reads none
ORDERS: tuple[tuple[int, ...], ...] = (
    (0, 1, 2, 3),
    (3, 0, 1, 2),
    (2, 0),
    (0,),
    (1, 3, 0),
    (),
    (0, 2, 1),
    (3, 2, 0),
)
SCORERS: tuple[SelectPolicy, ...] = ("window", "quest", "representatives", "partial")
"""Policies that select pages; each has a check of its own."""
_MOST_LAYERS = 4
_NEW_ROWS = 24


@dataclass(frozen=True)
class Placement:
    """The captured text's ``tokens``, read as keys from position ``offset``."""

    tokens: range
    offset: int

    def positions(self) -> range:
        return range(self.offset, self.offset + len(self.tokens))


class Stage:
    """One engine's attention, with captured states as its input."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.engine = subject.scripted_engine().engine
        self.attention: PagedAttention = self.engine.runner.attention
        self.pool = self.engine.runner.pool
        ends = [0]
        for document in subject.cases.documents:
            ends.append(ends[-1] + len(document))
        self.segments = [range(a, b) for a, b in itertools.pairwise(ends)]
        self.rows = range(ends[-1], ends[-1] + len(ORDERS))

    @cached_property
    def states(self) -> HeadStates:
        """q, k and v of the text by layer, in the model's own dtype."""
        states, definition = HeadStates(), self.subject.definition
        tokens = self.subject.cases.text_only.tokens
        definition.hidden(tokens, definition.full(tokens), self.subject.dtype, keep=states)
        return states

    @property
    def layers(self) -> list[int]:
        """Evenly spaced layers with the first and last, and one layer of every sliding window."""
        shape = self.subject.loaded.shape
        step = max(1, (shape.num_layers - 1) // (_MOST_LAYERS - 1))
        evenly_spaced = {*range(0, shape.num_layers, step), shape.num_layers - 1}
        windows = {shape.window(layer): layer for layer in range(shape.num_layers)}
        return sorted(evenly_spaced | set(windows.values()))

    def placements(self, order: Sequence[int]) -> list[Placement]:
        """The segments in this order, contiguous from position 0."""
        placements, start = [], 0
        for number in order:
            placements.append(Placement(self.segments[number], start))
            start += len(self.segments[number])
        return placements

    def store(self, layers: Sequence[int]) -> list[list[int]]:
        """Pages of every segment, after the engine's attention wrote its keys and values."""
        size, pages = self.pool.page_size, []
        for tokens in self.segments:
            segment_pages = self.take(len(tokens))
            pages.append(segment_pages)
            span = ReadSpan(segment_pages, 0, len(tokens), 0)
            chunk = PrefillChunk(range(len(tokens)), (span,))
            token_positions = torch.arange(len(tokens))
            slots = (
                torch.tensor(segment_pages)[token_positions // size] * size + token_positions % size
            )
            attend = self.step([], [chunk], slots, token_positions)
            for layer in layers:
                attend(layer, *self.of(layer, tokens))
        return pages

    def take(self, tokens: int) -> list[int]:
        """Newly allocated pages for ``tokens`` tokens."""
        pages = self.pool.allocate(-(-tokens // self.pool.page_size))
        assert pages is not None, "the pool has room for every case"
        return pages

    def of(self, layer: int, tokens: range) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a range of the text, as the model passes them to attention.

        Queries carry the scale of a RoPE law with an attention factor on part of the dims."""
        q, k, v = (x[tokens.start : tokens.stop] for x in self.states.layers[layer])
        scale = query_scale(self.subject.loaded.shape.rope_of(layer))
        return q if scale is None else q * scale.to(q), k, v

    def step(
        self,
        decode: Sequence[DecodeRow],
        chunks: Sequence[PrefillChunk],
        slots: Tensor,
        placements: Tensor,
        attention: PagedAttention | None = None,
    ) -> Attend:
        """The attention of a step."""
        device = self.subject.device
        rows = StepRows(decode, chunks, slots.to(device), placements.to(device))
        return (attention or self.attention).step(rows)

    def dense(
        self, layer: int, rows: range, row_positions: range, placements: Sequence[Placement]
    ) -> Callable[[torch.dtype, int], AttnState]:
        """A function of dtype and shift: attention of ``rows`` over the keys of all placements."""
        tokens = [token for placement in placements for token in placement.tokens]
        positions = [
            positions_at for placement in placements for positions_at in placement.positions()
        ]
        device, definition = self.subject.device, self.subject.definition
        positions_at = (
            torch.tensor([*row_positions], device=device),
            torch.tensor(positions, device=device),
        )
        q, k, v = self.states.layers[layer]
        keys = torch.tensor(tokens, device=device)

        def attended(dtype: torch.dtype, shift: int = 0) -> AttnState:
            queries = q[rows.start : rows.stop].to(dtype)
            return definition.state(
                layer, queries, k[keys].to(dtype), v[keys].to(dtype), positions_at, shift
            )

        return attended

    def compare(
        self,
        label: str,
        actual: Tensor,
        dense: Sequence[Callable[..., AttnState]],
        dtype: torch.dtype | None = None,
    ) -> Comparison:
        """The engine's rows against dense attention; each callable of ``dense`` gives some rows.

        ``dtype`` is that of the actual rows; the default is the subject's. Of rows over latents,
        the rotated dims are no output, so the comparison leaves them out."""
        dtype = dtype or self.subject.dtype
        latent = self.subject.loaded.shape.latent
        first = 0 if latent is None else latent.rope_dim

        def rows(in_dtype: torch.dtype, shift: int) -> Tensor:
            return torch.cat([attended(in_dtype, shift).out for attended in dense])[..., first:]

        exact = [attended(wider(dtype), 0) for attended in dense]
        plain = torch.stack([rows(dtype, shift) for shift in SHIFTS])
        truth = torch.cat([state.out for state in exact])[..., first:]
        lse = torch.cat([state.lse for state in exact])
        return Comparison(label, actual[..., first:], truth, plain, dtype, largest(lse))


@dataclass(frozen=True)
class LayerComparison:
    """One layer's decoded rows against dense attention."""

    layer: int
    rows: Comparison


def decode(
    stage: Stage, attention: PagedAttention | None = None, policy: PagePolicy | None = None
) -> list[LayerComparison]:
    """A decode row for each of `ORDERS`: it reads the segments in that order, then its newest key.

    With a ``policy``, rows select the pages of the segments that they read."""
    layers, size = stage.layers, stage.pool.page_size
    pages = stage.store(layers)
    rows, slots = list[DecodeRow](), list[int]()
    for order in ORDERS:
        placements, tail = stage.placements(order), stage.take(1)
        settled = tuple(
            ReadSpan(pages[n], placement.offset, len(placement.tokens), len(pages[n]))
            for n, placement in zip(order, placements, strict=True)
        )
        end = sum(len(placement.tokens) for placement in placements)
        row = DecodeRow(end, settled, ReadSpan(tail, end, 1, 0))
        if policy is not None and order:
            row = SelectingRow(end, settled, row.tail, policy, 0)
        rows.append(row)
        slots.append(tail[0] * size)
    first = torch.zeros(len(rows), dtype=torch.int64)
    attend = stage.step(rows, [], torch.tensor(slots), first, attention)
    comparisons = []
    for layer in layers:
        out = attend(layer, *stage.of(layer, stage.rows))
        dense = []
        for nth, (order, row) in enumerate(zip(ORDERS, rows, strict=True)):
            row_range = range(stage.rows[nth], stage.rows[nth] + 1)
            placements = [*stage.placements(order), Placement(row_range, row.position)]
            dense.append(
                stage.dense(layer, row_range, range(row.position, row.position + 1), placements)
            )
        comparisons.append(LayerComparison(layer, stage.compare(f"layer {layer}", out, dense)))
    _free(stage, [*pages, *([slot // size] for slot in slots)])
    return comparisons


def merge_equals_concatenation(subject: Subject) -> list[Finding]:
    """Law 1: the merge operator alone, and the engine's decode over several segments."""
    stage = Stage(subject)
    kinds = f"decoding over 0 to {len(stage.segments)} segments"
    return [
        _worst("the merge of dense states, empty ones among them", _merged(stage)),
        _worst(f"{kinds}, layers {_names(stage.layers)}", [d.rows for d in decode(stage)]),
    ]


def segments_at_offsets(subject: Subject) -> list[Finding]:
    """Law 2: new rows read stored segments at their offsets, and each other.

    Both plans are checked: that of short steps and that of long ones."""
    stage = Stage(subject)
    # short steps are planned like decode unless the plan is batch-invariant
    long = _variant(stage.attention, batch_invariant=True)
    label = f"new rows over segments in three orders, layers {_names(stage.layers)}"
    return [
        _worst(label, _new_rows(stage, stage.attention)),
        _worst("the same by the plan of long prompts", _new_rows(stage, long)),
    ]


def _new_rows(stage: Stage, attention: PagedAttention) -> list[Comparison]:
    layers, size = stage.layers, stage.pool.page_size
    pages = stage.store(layers)
    new = range(stage.rows.start, stage.rows.start + _NEW_ROWS)
    outs = defaultdict[int, list[Tensor]](list)
    dense = defaultdict[int, list[Callable[..., AttnState]]](list)
    for order in ORDERS[:3]:
        placements, tail = stage.placements(order), stage.take(_NEW_ROWS)
        end = sum(len(placement.tokens) for placement in placements)
        spans = [
            ReadSpan(pages[n], placement.offset, len(placement.tokens), len(pages[n]))
            for n, placement in zip(order, placements, strict=True)
        ]
        token_positions = torch.arange(_NEW_ROWS)
        slots = torch.tensor(tail)[token_positions // size] * size + token_positions % size
        chunk = PrefillChunk(
            range(end, end + _NEW_ROWS), (*spans, ReadSpan(tail, end, _NEW_ROWS, 0))
        )
        attend = stage.step([], [chunk], slots, token_positions, attention)
        for layer in layers:
            outs[layer].append(attend(layer, *stage.of(layer, new)))
            all_placements = [*placements, Placement(new, end)]
            dense[layer].append(
                stage.dense(layer, new, range(end, end + _NEW_ROWS), all_placements)
            )
        _free(stage, [tail])
    _free(stage, pages)
    return [stage.compare(f"layer {n}", torch.cat(outs[n]), dense[n]) for n in layers]


def selection_of_rows(subject: Subject) -> list[Finding]:
    """Law 5: rows that select pages with a budget for all of them."""
    stage = Stage(subject)
    findings = []
    for name in SCORERS:
        policy = make_policy(Select(name, ratio=1.0, dense_layers=()), subject.page_size)
        comparisons = [row.rows for row in decode(stage, policy=policy)]
        findings.append(
            _worst(f"rows that choose every page by {name}, against attention", comparisons)
        )
    return findings


def sharing_of_rows(subject: Subject) -> tuple[list[Finding], bool]:
    """Law 3: the same rows grouped and ungrouped; also whether any rows shared a read."""
    stage = Stage(subject)
    grouped_before = stage.attention.counters.grouped_rows
    grouped_comparisons = decode(stage)
    shared = stage.attention.counters.grouped_rows > grouped_before
    ungrouped_comparisons = decode(stage, _variant(stage.attention, grouping=False))
    between = [
        grouped.rows.against(f"layer {grouped.layer}", ungrouped.rows.actual)
        for grouped, ungrouped in zip(grouped_comparisons, ungrouped_comparisons, strict=True)
    ]
    worst = max(between, key=lambda finding: finding.share)
    label = f"rows read together and alone, layers {_names(stage.layers)}"
    return [replace(worst, label=label)], shared


def _variant(
    attention: PagedAttention, *, grouping: bool | None = None, batch_invariant: bool | None = None
) -> PagedAttention:
    """The same attention with another plan."""
    plan = attention.grouping, attention.batch_invariant
    return PagedAttention(
        pool=attention.pool,
        rotations=attention.rotations,
        rules=attention.rules,
        num_qo_heads=attention.num_qo_heads,
        grouping=plan[0] if grouping is None else grouping,
        batch_invariant=plan[1] if batch_invariant is None else batch_invariant,
        implementation=attention.implementation,
        costs=attention.costs,
        row_dtype=attention.row_dtype,
        query_scaling=attention.query_scaling,
    )


def _merged(stage: Stage) -> list[Comparison]:
    """States of dense attention over each placement, merged by the operator in fp32."""
    definition, device = stage.subject.definition, stage.subject.device
    comparisons = []
    for layer in stage.layers:
        states, indptr, whole = list[AttnState](), [0], []
        q, k, v = (x.float() for x in stage.states.layers[layer])
        for nth, order in enumerate(ORDERS):
            placements, row = stage.placements(order), stage.rows[nth]
            end = sum(len(placement.tokens) for placement in placements)
            query_position = torch.tensor([end], device=device)
            for placement in [
                *placements,
                Placement(range(row, row + 1), end),
                Placement(range(0), 0),
            ]:
                keys = torch.tensor([*placement.tokens], dtype=torch.int64, device=device)
                key_positions = torch.tensor(
                    [*placement.positions()], dtype=torch.int64, device=device
                )
                states.append(
                    definition.state(
                        layer,
                        q[row : row + 1],
                        k[keys],
                        v[keys],
                        (query_position, key_positions),
                        final=False,
                    )
                )
            indptr.append(len(states))
            all_placements = [*placements, Placement(range(row, row + 1), end)]
            whole.append(
                stage.dense(layer, range(row, row + 1), range(end, end + 1), all_placements)
            )
        joined = AttnState(torch.cat([s.out for s in states]), torch.cat([s.lse for s in states]))
        rows = torch.tensor(indptr, dtype=torch.int32, device=device)
        merged = merge_states(joined, rows)
        sinks = stage.attention.rules[layer].sinks
        if sinks is not None:
            add_sinks(merged, sinks)
        comparisons.append(stage.compare(f"layer {layer}", merged.out, whole, torch.float32))
    return comparisons


def _worst(label: str, comparisons: Sequence[Comparison]) -> Finding:
    """The finding with the largest share of its budget, with another label."""
    return replace(max((c.finding() for c in comparisons), key=lambda f: f.share), label=label)


def _names(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))


def _free(stage: Stage, runs: Sequence[Sequence[int]]) -> None:
    for pages in runs:
        stage.pool.free(pages)

"""Laws 1 to 3 where they are sharpest: one layer's attention, on the checkpoint's own queries, keys
and values.

The states of a plain text are captured from a dense pass. The engine's attention then stores runs
of them as segments, in pages and frames, and reads them in other orders at other places; a dense
softmax over the same keys at their true positions says what must come out.
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
from looseleaf.attention.select.candidates import PagePolicy, SelectingRow
from looseleaf.config import Select, SelectPolicy
from looseleaf.ops.merge_states import merge_states
from looseleaf.rope import query_scale
from looseleaf.sparse import make_policy
from looseleaf.types import Attend, AttnState
from looseleaf_lab.conformance.definition import SHIFTS, HeadStates, wider
from looseleaf_lab.conformance.subject import Subject
from looseleaf_lab.conformance.verdict import Finding, Judged, largest

# the orders in which rows read the segments; one reads none
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
"""Policies that choose pages; each is checked by itself."""
_MOST_LAYERS = 4
_NEW_ROWS = 24


@dataclass(frozen=True)
class Place:
    """Keys of the captured text, ``tokens``, standing at ``offset`` and on."""

    tokens: range
    offset: int

    def positions(self) -> range:
        return range(self.offset, self.offset + len(self.tokens))


class Stage:
    """One engine's attention, with captured states to read."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.engine = subject.answering().engine
        self.attention: PagedAttention = self.engine.runner.attention
        self.pool = self.engine.runner.pool
        ends = [0]
        for document in subject.cases.documents:
            ends.append(ends[-1] + len(document))
        self.segments = [range(a, b) for a, b in itertools.pairwise(ends)]
        self.rows = range(ends[-1], ends[-1] + len(ORDERS))

    @cached_property
    def states(self) -> HeadStates:
        """What the model makes of the text, in its own dtype."""
        kept, definition = HeadStates(), self.subject.definition
        tokens = self.subject.cases.plain.tokens
        definition.hidden(tokens, definition.full(tokens), self.subject.dtype, keep=kept)
        return kept

    @property
    def layers(self) -> list[int]:
        """A few layers from first to last, and one of every sliding window."""
        shape = self.subject.loaded.shape
        step = max(1, (shape.num_layers - 1) // (_MOST_LAYERS - 1))
        some = {*range(0, shape.num_layers, step), shape.num_layers - 1}
        windows = {shape.window(layer): layer for layer in range(shape.num_layers)}
        return sorted(some | set(windows.values()))

    def places(self, order: Sequence[int]) -> list[Place]:
        """The segments in this order, one behind the other."""
        found, start = [], 0
        for number in order:
            found.append(Place(self.segments[number], start))
            start += len(self.segments[number])
        return found

    def store(self, layers: Sequence[int]) -> list[list[int]]:
        """Every segment in pages of its own, written by the engine's attention."""
        size, pages = self.pool.page_size, []
        for tokens in self.segments:
            taken = self.take(len(tokens))
            pages.append(taken)
            span = ReadSpan(taken, 0, len(tokens), 0)
            chunk = PrefillChunk(range(len(tokens)), (span,))
            at = torch.arange(len(tokens))
            slots = torch.tensor(taken)[at // size] * size + at % size
            attend = self.step([], [chunk], slots, at)
            for layer in layers:
                attend(layer, *self.of(layer, tokens))
        return pages

    def take(self, tokens: int) -> list[int]:
        """Pages for so many tokens."""
        pages = self.pool.allocate(-(-tokens // self.pool.page_size))
        assert pages is not None, "the pool has room for every case"
        return pages

    def of(self, layer: int, tokens: range) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of some tokens of the text, as the model hands them over: where
        RoPE has an attention factor and turns only some dims, queries are scaled for it."""
        q, k, v = (x[tokens.start : tokens.stop] for x in self.states.layers[layer])
        scale = query_scale(self.subject.loaded.shape.rope_of(layer))
        return q if scale is None else q * scale.to(q), k, v

    def step(
        self,
        decode: Sequence[DecodeRow],
        chunks: Sequence[PrefillChunk],
        slots: Tensor,
        places: Tensor,
        attention: PagedAttention | None = None,
    ) -> Attend:
        """The attention of a step."""
        device = self.subject.device
        rows = StepRows(decode, chunks, slots.to(device), places.to(device))
        return (attention or self.attention).step(rows)

    def dense(
        self, layer: int, rows: range, row_positions: range, places: Sequence[Place]
    ) -> Callable[[torch.dtype, int], AttnState]:
        """Attention of rows over the concatenated keys of all places, in any dtype."""
        tokens = [token for place in places for token in place.tokens]
        positions = [at for place in places for at in place.positions()]
        device, definition = self.subject.device, self.subject.definition
        at = torch.tensor([*row_positions], device=device), torch.tensor(positions, device=device)
        q, k, v = self.states.layers[layer]
        keys = torch.tensor(tokens, device=device)

        def attended(dtype: torch.dtype, shift: int = 0) -> AttnState:
            mine = q[rows.start : rows.stop].to(dtype)
            return definition.state(layer, mine, k[keys].to(dtype), v[keys].to(dtype), at, shift)

        return attended

    def judge(
        self,
        what: str,
        actual: Tensor,
        dense: Sequence[Callable[..., AttnState]],
        dtype: torch.dtype | None = None,
    ) -> Judged:
        """The engine's rows, or others of ``dtype``, beside what dense attention says of them, one
        call for some rows."""
        dtype = dtype or self.subject.dtype

        def rows(in_dtype: torch.dtype, shift: int) -> Tensor:
            return torch.cat([attended(in_dtype, shift).out for attended in dense])

        true = [attended(wider(dtype), 0) for attended in dense]
        plain = torch.stack([rows(dtype, shift) for shift in SHIFTS])
        truth, lse = torch.cat([state.out for state in true]), torch.cat([s.lse for s in true])
        return Judged(what, actual, truth, plain, dtype, largest(lse))


@dataclass(frozen=True)
class Decoded:
    """What rows that decode got of one layer, and what dense attention says."""

    layer: int
    judged: Judged


def decode(
    stage: Stage, attention: PagedAttention | None = None, policy: PagePolicy | None = None
) -> list[Decoded]:
    """A row for each of `ORDERS`: it reads the segments in that order, then its own newest key.

    With a ``policy`` rows choose which pages of the segments they read."""
    layers, size = stage.layers, stage.pool.page_size
    pages = stage.store(layers)
    rows, slots = list[DecodeRow](), list[int]()
    for order in ORDERS:
        places, tail = stage.places(order), stage.take(1)
        settled = tuple(
            ReadSpan(pages[n], place.offset, len(place.tokens), len(pages[n]))
            for n, place in zip(order, places, strict=True)
        )
        end = sum(len(place.tokens) for place in places)
        row = DecodeRow(end, settled, ReadSpan(tail, end, 1, 0))
        if policy is not None and order:
            row = SelectingRow(end, settled, row.tail, policy, 0)
        rows.append(row)
        slots.append(tail[0] * size)
    first = torch.zeros(len(rows), dtype=torch.int64)
    attend = stage.step(rows, [], torch.tensor(slots), first, attention)
    found = []
    for layer in layers:
        out = attend(layer, *stage.of(layer, stage.rows))
        dense = []
        for nth, (order, row) in enumerate(zip(ORDERS, rows, strict=True)):
            own = range(stage.rows[nth], stage.rows[nth] + 1)
            places = [*stage.places(order), Place(own, row.position)]
            dense.append(stage.dense(layer, own, range(row.position, row.position + 1), places))
        found.append(Decoded(layer, stage.judge(f"layer {layer}", out, dense)))
    _give_back(stage, [*pages, *([slot // size] for slot in slots)])
    return found


def merge_equals_concatenation(subject: Subject) -> list[Finding]:
    """Law 1: the merge by itself, and the engine's reading of segments one by one."""
    stage = Stage(subject)
    kinds = f"decoding over 0 to {len(stage.segments)} segments"
    return [
        _worst("the merge of dense states, empty ones among them", _merged(stage)),
        _worst(f"{kinds}, layers {_told(stage.layers)}", [d.judged for d in decode(stage)]),
    ]


def segments_at_offsets(subject: Subject) -> list[Finding]:
    """Law 2: new rows that read stored segments at their offsets, and see each other; by the plan
    of a step this short, and by that of a long one."""
    stage = Stage(subject)
    # a step of few new rows is read as if it decoded, but for a plan that never changes with length
    long = _variant(stage.attention, batch_invariant=True)
    told = f"new rows over segments in three orders, layers {_told(stage.layers)}"
    return [
        _worst(told, _new_rows(stage, stage.attention)),
        _worst("the same by the plan of long prompts", _new_rows(stage, long)),
    ]


def _new_rows(stage: Stage, attention: PagedAttention) -> list[Judged]:
    layers, size = stage.layers, stage.pool.page_size
    pages = stage.store(layers)
    new = range(stage.rows.start, stage.rows.start + _NEW_ROWS)
    outs = defaultdict[int, list[Tensor]](list)
    dense = defaultdict[int, list[Callable[..., AttnState]]](list)
    for order in ORDERS[:3]:
        places, tail = stage.places(order), stage.take(_NEW_ROWS)
        end = sum(len(place.tokens) for place in places)
        spans = [
            ReadSpan(pages[n], place.offset, len(place.tokens), len(pages[n]))
            for n, place in zip(order, places, strict=True)
        ]
        at = torch.arange(_NEW_ROWS)
        slots = torch.tensor(tail)[at // size] * size + at % size
        chunk = PrefillChunk(
            range(end, end + _NEW_ROWS), (*spans, ReadSpan(tail, end, _NEW_ROWS, 0))
        )
        attend = stage.step([], [chunk], slots, at, attention)
        for layer in layers:
            outs[layer].append(attend(layer, *stage.of(layer, new)))
            every = [*places, Place(new, end)]
            dense[layer].append(stage.dense(layer, new, range(end, end + _NEW_ROWS), every))
        _give_back(stage, [tail])
    _give_back(stage, pages)
    return [stage.judge(f"layer {n}", torch.cat(outs[n]), dense[n]) for n in layers]


def selection_of_rows(subject: Subject) -> list[Finding]:
    """Law 5: rows that choose pages, and have a budget for all of them."""
    stage = Stage(subject)
    found = []
    for name in SCORERS:
        policy = make_policy(Select(name, ratio=1.0, dense_layers=()), subject.page_size)
        judged = [decoded.judged for decoded in decode(stage, policy=policy)]
        found.append(_worst(f"rows that choose every page by {name}, against attention", judged))
    return found


def sharing_of_rows(subject: Subject) -> tuple[list[Finding], bool]:
    """Law 3: the same rows together and each alone; also whether any were read together."""
    stage = Stage(subject)
    before = stage.attention.counters.grouped_rows
    together = decode(stage)
    shared = stage.attention.counters.grouped_rows > before
    alone = decode(stage, _variant(stage.attention, grouping=False))
    between = [
        mine.judged.against(f"layer {mine.layer}", other.judged.actual)
        for mine, other in zip(together, alone, strict=True)
    ]
    worst = max(between, key=lambda finding: finding.share)
    told = f"rows read together and alone, layers {_told(stage.layers)}"
    return [replace(worst, what=told)], shared


def _variant(
    attention: PagedAttention, *, grouping: bool | None = None, batch_invariant: bool | None = None
) -> PagedAttention:
    """The same attention with another plan."""
    kept = attention.grouping, attention.batch_invariant
    return PagedAttention(
        pool=attention.pool,
        rotations=attention.rotations,
        rules=attention.rules,
        num_qo_heads=attention.num_qo_heads,
        grouping=kept[0] if grouping is None else grouping,
        batch_invariant=kept[1] if batch_invariant is None else batch_invariant,
        implementation=attention.implementation,
        costs=attention.costs,
        row_dtype=attention.row_dtype,
    )


def _merged(stage: Stage) -> list[Judged]:
    """States of dense attention over every part by itself, merged by the operator, in fp32."""
    definition, device = stage.subject.definition, stage.subject.device
    found = []
    for layer in stage.layers:
        states, indptr, whole = list[AttnState](), [0], []
        q, k, v = (x.float() for x in stage.states.layers[layer])
        for nth, order in enumerate(ORDERS):
            places, row = stage.places(order), stage.rows[nth]
            end = sum(len(place.tokens) for place in places)
            here = torch.tensor([end], device=device)
            for place in [*places, Place(range(row, row + 1), end), Place(range(0), 0)]:
                keys = torch.tensor([*place.tokens], dtype=torch.int64, device=device)
                at = torch.tensor([*place.positions()], dtype=torch.int64, device=device)
                states.append(
                    definition.state(layer, q[row : row + 1], k[keys], v[keys], (here, at))
                )
            indptr.append(len(states))
            every = [*places, Place(range(row, row + 1), end)]
            whole.append(stage.dense(layer, range(row, row + 1), range(end, end + 1), every))
        joined = AttnState(torch.cat([s.out for s in states]), torch.cat([s.lse for s in states]))
        rows = torch.tensor(indptr, dtype=torch.int32, device=device)
        merged = merge_states(joined, rows).out
        found.append(stage.judge(f"layer {layer}", merged, whole, torch.float32))
    return found


def _worst(what: str, judged: Sequence[Judged]) -> Finding:
    """The finding with the largest share of its budget, under another name."""
    return replace(max((j.finding() for j in judged), key=lambda f: f.share), what=what)


def _told(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))


def _give_back(stage: Stage, runs: Sequence[Sequence[int]]) -> None:
    for pages in runs:
        stage.pool.free(pages)

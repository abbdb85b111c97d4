"""A step of attention on the CPU: settled spans in buckets that are kept from step to step, tails
on their own, one merge.

What changes from one decode step to the next is little: every row stands one further, and its tail
has one more key. So buckets are prepared when the rows change, and a step only looks up angles.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from looseleaf.attention.groups import DecodeRow, Groups, Item, tail_items
from looseleaf.attention.plan import PrefillChunk, make_span_list, make_work_list
from looseleaf.kv.pool import PagePool
from looseleaf.ops.flash_cpu import (
    KeyBlock,
    PageLayout,
    attend_dense,
    page_memory,
    visibility_bias,
)
from looseleaf.ops.partial_attention.cpu import (
    Bucket,
    pack_groups,
    prepare,
    run_buckets,
)
from looseleaf.ops.prefill_attention.cpu import PreparedRequest, prepare_prefill, run_prefill
from looseleaf.ops.rotate.cpu import Turn, TurnTable, turn_heads
from looseleaf.types import Attend, Rotation, ScoreRule

T = TypeVar("T")
Memory = tuple[Tensor, Tensor]
_CPU = torch.device("cpu")
# so few tails, or tails of so many keys, are read one by one: without padding, mostly in place;
# many in bf16 are better gathered into one product
_FEW_ROWS = 4
_LONG_TAIL = 128
# settled spans of single rows are read together with the tails, padded, up to so many pages in all
_ALONE_PAGES = 1024


@dataclass(frozen=True)
class _Kept:
    """What stays from step to step while the rows do.

    ``alone`` are settled spans of single rows that are read together with the tails. ``rows`` and
    ``offsets`` say for every state whose query it takes and in which frame: first the states of
    ``buckets``, then the tails', then those of ``alone``. ``merge_index`` ``[rows, states]`` lists
    each row's states, ``hidden`` what pads it; None if every row has its tail and no more.
    """

    groups: Groups
    buckets: tuple[Bucket, ...]
    alone: tuple[Item, ...]
    rows: Tensor
    offsets: Tensor
    merge_index: Tensor | None
    hidden: Tensor | None

    @property
    def num_bucket_states(self) -> int:
        return sum(bucket.num_items * bucket.num_rows for bucket in self.buckets)


@dataclass(eq=False)
class CpuAttention:
    """The CPU's attention over one pool."""

    pool: PagePool
    rotation: Rotation
    rules: tuple[ScoreRule, ...]
    num_qo_heads: int
    _kept: dict[int, _Kept] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layout = PageLayout.of(self.pool.layer(0)[0], self.num_qo_heads)
        self.table = TurnTable.create(self.rotation)
        self.memory = [
            (page_memory(k), page_memory(v))
            for k, v in (self.pool.layer(layer) for layer in range(len(self.rules)))
        ]
        self._heads = torch.arange(self.layout.num_kv_heads)

    def step(
        self,
        rows: Sequence[DecodeRow],
        groups: Groups,
        chunks: Sequence[PrefillChunk],
        slots: Tensor,
        frame_positions: Tensor,
    ) -> Attend:
        """The attention of one step; `looseleaf.attention.paged.StepRows` says what it is given."""
        positions = torch.tensor([row.position for row in rows], dtype=torch.int64)
        page_size = self.pool.page_size
        pages = torch.div(slots, page_size, rounding_mode="floor")
        index = (pages[:, None], self._heads, (slots % page_size)[:, None])
        decode: list[_CpuDecode | None] = [None] * len(self.rules)
        if rows:
            decode = self._per_rule(lambda rule: self._decode(rows, groups, positions, rule))
        prefill: list[tuple[PreparedRequest, ...] | None] = [None] * len(self.rules)
        if chunks:
            largest = max(len(chunk.positions) for chunk in chunks)
            spans = make_span_list(chunks, tile_rows=largest, device=_CPU)
            prefill = self._per_rule(
                lambda rule: prepare_prefill(spans, self.layout, self.table, rule)
            )
        turn = self.table.at(frame_positions)
        return _CpuStep(self, len(rows), turn, index, decode, prefill)

    def _decode(
        self, rows: Sequence[DecodeRow], groups: Groups, positions: Tensor, rule: ScoreRule
    ) -> "_CpuDecode":
        kept = self._keep(rows, groups, rule)
        frame_rows = positions.index_select(0, kept.rows).sub_(kept.offsets).clamp_min_(0)
        return _CpuDecode(kept, self.table.at(frame_rows), self._tails(rows, kept, rule))

    def _keep(self, rows: Sequence[DecodeRow], groups: Groups, rule: ScoreRule) -> _Kept:
        kept = self._kept.get(rule.window)
        # what a window or ALiBi shows of a settled span changes with every step
        if kept is None or kept.groups is not groups or not self._plain(rule):
            kept = self._kept[rule.window] = self._prepare(rows, groups, rule)
        return kept

    def _prepare(self, rows: Sequence[DecodeRow], groups: Groups, rule: ScoreRule) -> _Kept:
        alone = _alone(groups, len(rows)) if self._plain(rule) else []
        taken = {id(item) for item in alone}
        shared = [item for item in groups.items if id(item) not in taken]
        work = make_work_list(shared, rows, page_size=self.pool.page_size, device=_CPU)
        prepared = prepare(work, self.layout, rule)
        states = [prepared.order[a:b].tolist() for a, b in pairwise(work.row_state_indptr.tolist())]
        own_rows = [*range(len(rows)), *(item.entries[0].row for item in alone)]
        own_offsets = [row.tail.offset for row in rows] + [i.entries[0].offset for i in alone]
        for place, row in enumerate(own_rows):
            states[row].append(len(prepared.rows) + place)
        index, hidden = _padded(states)
        return _Kept(
            groups,
            prepared.buckets,
            tuple(alone),
            torch.from_numpy(np.append(prepared.rows, own_rows)),
            torch.from_numpy(np.append(prepared.offsets, own_offsets)),
            index if groups.items else None,
            hidden,
        )

    def _tails(
        self, rows: Sequence[DecodeRow], kept: _Kept, rule: ScoreRule
    ) -> tuple[KeyBlock, ...]:
        """What rows read alone: one block for all, or one each with its exact number of keys."""
        size = self.pool.page_size
        items = [*tail_items(rows, kept.groups), *kept.alone]
        runs = [np.asarray(item.pages) for item in items]
        lengths = [item.entries[0].bound - item.first_page * size for item in items]
        long = sum(lengths) >= _LONG_TAIL * len(items) and self.pool.kv.dtype is not torch.bfloat16
        if self._plain(rule) and (len(items) <= _FEW_ROWS or long):
            pairs = zip(runs, lengths, strict=True)
            return tuple(KeyBlock.create(run[None], self.layout, length) for run, length in pairs)
        width = max(len(run) for run in runs)
        # a row's padding repeats its own first page: finite, its own, and hidden
        pages = np.array([[*run, *[run[0]] * (width - len(run))] for run in runs])
        keys = np.arange(width * size)
        distance = np.array(lengths)[:, None, None] - 1 - keys
        visible = distance >= 0
        if rule.window:
            visible &= distance < rule.window
        bias, blind = visibility_bias(visible, distance, self.layout.group, rule)
        return (KeyBlock.create(pages, self.layout, len(keys), bias, blind),)

    def _plain(self, rule: ScoreRule) -> bool:
        """Whether keys that a row has passed stay visible and alike, step by step."""
        return not rule.window and rule.alibi_slopes is None

    def _per_rule(self, make: Callable[[ScoreRule], T]) -> list[T]:
        """``make(rule)`` for every layer, made once per window: rules differ in nothing else."""
        made: dict[int, T] = {}
        for rule in self.rules:
            if rule.window not in made:
                made[rule.window] = make(rule)
        return [made[rule.window] for rule in self.rules]


@dataclass(frozen=True)
class _CpuDecode:
    """The decode rows of a step under one score rule; ``turn`` has the angles of every state."""

    kept: _Kept
    turn: Turn
    tails: tuple[KeyBlock, ...]

    def run(self, q: Tensor, memory: Memory, rule: ScoreRule) -> Tensor:
        """One output a row."""
        index = self.kept.merge_index
        if index is None:
            return self._read_tails(turn_heads(q, self.turn), memory, rule)[0]
        turned = turn_heads(q.index_select(0, self.kept.rows), self.turn)
        split = self.kept.num_bucket_states
        out, lse = self._read_tails(turned[split:], memory, rule)
        if self.kept.buckets:
            done = run_buckets(turned[:split], memory, self.kept.buckets, rule)
            out, lse = torch.cat([done[0], out]), torch.cat([done[1], lse])
        lse = lse.index_select(0, index.view(-1)).view(*index.shape, -1)
        if self.kept.hidden is not None:
            lse = lse.masked_fill(self.kept.hidden, -torch.inf)
        # softmax over states is the merge; a row sees at least its own key, so it is never 0 / 0
        weight = lse.softmax(1)[..., None]
        parts = out.index_select(0, index.view(-1)).view(*index.shape, *out.shape[1:])
        return (parts * weight).sum(1).to(q.dtype)

    def _read_tails(self, turned: Tensor, memory: Memory, rule: ScoreRule) -> tuple[Tensor, Tensor]:
        rows, num_qo_heads, head_dim = turned.shape
        k_memory, v_memory = memory
        packed = pack_groups(turned, rows, self.tails[0].layout.num_kv_heads)
        if len(self.tails) == 1:
            (block,) = self.tails
            k, v = block.read(k_memory), block.read(v_memory)
            out, lse = attend_dense(packed, k, v, rule, block.bias, block.blind)
        else:
            done = [
                attend_dense(part, block.read(k_memory), block.read(v_memory), rule)
                for part, block in zip(packed.split(1), self.tails, strict=True)
            ]
            out, lse = torch.cat([o for o, _ in done]), torch.cat([s for _, s in done])
        # one row an item: the query heads are in their order already
        return out.reshape(rows, num_qo_heads, head_dim), lse.reshape(rows, num_qo_heads)


@dataclass(frozen=True)
class _CpuStep:
    """What the model's layers call."""

    owner: CpuAttention
    num_decode_rows: int
    turn: Turn
    index: tuple[Tensor, Tensor, Tensor]
    decode: list[_CpuDecode | None]
    prefill: list[tuple[PreparedRequest, ...] | None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_pages, v_pages = self.owner.pool.layer(layer)
        memory = self.owner.memory[layer]
        rule, split = self.owner.rules[layer], self.num_decode_rows
        k_pages.index_put_(self.index, turn_heads(k, self.turn).to(k_pages.dtype))
        v_pages.index_put_(self.index, v.to(v_pages.dtype))
        decode, prefill = self.decode[layer], self.prefill[layer]
        if prefill is None:
            assert decode is not None, "a step has rows of one kind or the other"
            return decode.run(q, memory, rule)
        new = run_prefill(q[split:], *memory, prefill, rule).out.to(q.dtype)
        if decode is None:
            return new
        old = decode.run(q[:split], memory, rule)
        return torch.cat([old, new])


def _alone(groups: Groups, num_rows: int) -> list[Item]:
    """Items of single rows, the shortest first, as long as one padded block holds them."""
    single = sorted((i for i in groups.items if len(i.entries) == 1), key=lambda i: len(i.pages))
    sizes = [(n + 1 + num_rows) * len(item.pages) for n, item in enumerate(single)]
    return [item for item, size in zip(single, sizes, strict=True) if size <= _ALONE_PAGES]


def _padded(states: list[list[int]]) -> tuple[Tensor, Tensor | None]:
    """Lists of states as one index ``[rows, states]``, and what pads it, ``[rows, states, 1]``."""
    width = max(map(len, states))
    # a row's padding repeats its last state, hidden
    index = torch.tensor([[*row, *row[-1:] * (width - len(row))] for row in states])
    if all(len(row) == width for row in states):
        return index, None
    counts = torch.tensor([len(row) for row in states])
    return index, (torch.arange(width) >= counts[:, None])[..., None]

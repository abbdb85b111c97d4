"""A step of attention on the CPU: settled spans in buckets that are kept from step to step, tails
on their own, one merge.

What changes from one decode step to the next is little: every row stands one further, and its tail
has one more key. So buckets are prepared when the rows change, and a step only looks up angles.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from looseleaf.attention.groups import DecodeRow, Groups
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
    PreparedWork,
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
# so few tails, or tails of so many keys, are read one by one: without padding, mostly in place
_FEW_ROWS = 4
_LONG_TAIL = 128


@dataclass(frozen=True)
class _Settled:
    """The prepared groups of the rows, and where each row's states are: ``merge_index`` ``[rows,
    states]`` into the settled states followed by the tails', ``hidden`` what pads it."""

    groups: Groups
    work: PreparedWork
    merge_index: Tensor
    hidden: Tensor | None


@dataclass(eq=False)
class CpuAttention:
    """The CPU's attention over one pool."""

    pool: PagePool
    rotation: Rotation
    rules: tuple[ScoreRule, ...]
    num_qo_heads: int
    _settled: dict[int, _Settled] = field(default_factory=dict)

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
        settled = self._prepare_settled(rows, groups, rule)
        turns = settled.work.turns(positions, self.table) if settled else []
        return _CpuDecode(settled, turns, self._tails(rows, groups, rule))

    def _prepare_settled(
        self, rows: Sequence[DecodeRow], groups: Groups, rule: ScoreRule
    ) -> _Settled | None:
        if not groups.items:
            return None
        kept = self._settled.get(rule.window)
        # what a window or ALiBi shows of a settled span changes with every step
        moves = bool(rule.window) or rule.alibi_slopes is not None
        if kept is not None and kept.groups is groups and not moves:
            return kept
        work = make_work_list(groups.items, rows, page_size=self.pool.page_size, device=_CPU)
        prepared = prepare(work, self.layout, rule)
        merge_index, hidden = _merge_index(work.row_state_indptr.numpy(), prepared.order)
        made = _Settled(groups, prepared, merge_index, hidden)
        self._settled[rule.window] = made
        return made

    def _tails(
        self, rows: Sequence[DecodeRow], groups: Groups, rule: ScoreRule
    ) -> tuple[KeyBlock, ...]:
        """What rows read alone: one block for all, or one each with its exact number of keys."""
        size = self.pool.page_size
        starts = groups.tail_starts
        lengths = [r.tail.length - start * size for r, start in zip(rows, starts, strict=True)]
        runs = [np.asarray(r.tail.pages[start:]) for r, start in zip(rows, starts, strict=True)]
        plain = not rule.window and rule.alibi_slopes is None
        if plain and (len(rows) <= _FEW_ROWS or sum(lengths) >= _LONG_TAIL * len(rows)):
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

    def _per_rule(self, make: Callable[[ScoreRule], T]) -> list[T]:
        """``make(rule)`` for every layer, made once per window: rules differ in nothing else."""
        made: dict[int, T] = {}
        for rule in self.rules:
            if rule.window not in made:
                made[rule.window] = make(rule)
        return [made[rule.window] for rule in self.rules]


@dataclass(frozen=True)
class _CpuDecode:
    """The decode rows of a step under one score rule."""

    settled: _Settled | None
    turns: list[Turn]
    tails: tuple[KeyBlock, ...]

    def run(self, q: Tensor, turn: Turn, memory: Memory, rule: ScoreRule) -> Tensor:
        """One output a row; ``turn`` has the angles of the rows in their tails."""
        out, lse = self._read_tails(turn_heads(q, turn), memory, rule)
        if self.settled is None:
            return out
        done = run_buckets(q, *memory, self.settled.work, self.turns, rule)
        index = self.settled.merge_index
        lse = torch.cat([done[1], lse]).index_select(0, index.view(-1)).view(*index.shape, -1)
        if self.settled.hidden is not None:
            lse = lse.masked_fill(self.settled.hidden[..., None], -torch.inf)
        parts = torch.cat([done[0], out]).index_select(0, index.view(-1))
        # softmax over states is the merge; a row sees at least its own key, so it is never 0 / 0
        weight = lse.softmax(1)[..., None]
        return (parts.view(*index.shape, *out.shape[1:]) * weight).sum(1).to(q.dtype)

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
            return decode.run(q, self.turn, memory, rule)
        new = run_prefill(q[split:], *memory, prefill, rule).out.to(q.dtype)
        if decode is None:
            return new
        old = decode.run(q[:split], self.turn.first(split), memory, rule)
        return torch.cat([old, new])


def _merge_index(indptr: np.ndarray, order: np.ndarray) -> tuple[Tensor, Tensor | None]:
    """Rows' settled states, then their tail's, which stand behind all settled ones."""
    counts = np.diff(indptr)
    width = np.arange(max(1, counts.max()))
    padding = width >= counts[:, None]
    settled = order[np.minimum(indptr[:-1, None] + width, len(order) - 1)]
    tails = len(order) + np.arange(len(counts))[:, None]
    index = torch.from_numpy(np.concatenate([settled, tails], axis=1))
    if not padding.any():
        return index, None
    return index, torch.from_numpy(np.pad(padding, ((0, 0), (0, 1))))

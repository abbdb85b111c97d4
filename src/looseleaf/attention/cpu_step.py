"""A step of attention on the CPU: keys and values to their pages, decode rows by work list, new
rows by span.

Decode rows are read by the C kernels, one call a layer; without a C compiler by batched products.
New rows go through PyTorch's flash attention span by span. What a step needs is decided once and
shared by its layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from looseleaf.attention.decode_lists import DecodeLists
from looseleaf.attention.groups import DecodeRow, Groups
from looseleaf.attention.plan import PrefillChunk, make_span_list
from looseleaf.kv.pool import PagePool
from looseleaf.ops.flash_cpu import PageLayout, page_memory
from looseleaf.ops.merge_states import merge_states
from looseleaf.ops.page_dtypes import to_pages
from looseleaf.ops.partial_attention.cpu import PreparedWork, prepare, run_prepared
from looseleaf.ops.partial_attention.native import NativePlan, Phase
from looseleaf.ops.prefill_attention.cpu import PreparedRequest, prepare_prefill, run_prefill
from looseleaf.ops.rotate.cpu import Turn, TurnTable, turn_heads
from looseleaf.types import Attend, Rotation, ScoreRule

T = TypeVar("T")
Prefill = tuple[PreparedRequest, ...]
_CPU = torch.device("cpu")
# enough work for a thread's turn, few enough keys that a short batch feeds many threads; always the
# same, so that a row's sums do not depend on its batch
_SPLIT_KEYS = 256


@dataclass(eq=False)
class CpuAttention:
    """The CPU's attention over one pool; ``native`` says whether decode rows go through C,
    ``row_dtype`` what queries, keys and values come in."""

    pool: PagePool
    rotation: Rotation
    rules: tuple[ScoreRule, ...]
    num_qo_heads: int
    native: bool
    row_dtype: torch.dtype
    _lists: DecodeLists | None = None
    _plans: dict[int, NativePlan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layout = PageLayout.of(self.pool.layer(0)[0], self.num_qo_heads)
        self.table = TurnTable.create(self.rotation)
        self.memory = [
            (page_memory(k), page_memory(v))
            for k, v in (self.pool.layer(layer) for layer in range(len(self.rules)))
        ]
        self.heads = torch.arange(self.layout.num_kv_heads)
        self._storing = self._native_plan(self.rules[0], None) if self.native else None

    def step(
        self,
        rows: Sequence[DecodeRow],
        groups: Groups,
        chunks: Sequence[PrefillChunk],
        asked: Sequence[PrefillChunk] | None,
        slots: Tensor,
        frame_positions: Tensor,
    ) -> Attend:
        """The attention of one step; `looseleaf.attention.paged.StepRows` says what it is given.

        ``asked`` are the chunks of the last layer, None if it has queries of every row."""
        prefill = self._per_window(self._prefill(chunks))
        if asked is not None:
            prefill[-1] = self._prefill(asked)(self.rules[-1])
        lists = self._move_lists(rows, groups) if rows else None
        if not self.native:
            turn = self.table.at(frame_positions)
            return _TorchStep(self, len(rows), prefill, self._torch_decode(lists), slots, turn)
        plans = self._per_window(lambda rule: self._plan(rule, lists))
        for plan in plans:
            plan.point_rows(slots, frame_positions)
        return _NativeStep(self, len(rows), prefill, plans)

    def _prefill(self, chunks: Sequence[PrefillChunk]) -> Callable[[ScoreRule], Prefill | None]:
        """What prepares ``chunks`` for a layer's rule."""
        if not chunks:
            return lambda rule: None
        largest = max(len(chunk.positions) for chunk in chunks)
        spans = make_span_list(chunks, tile_rows=largest, device=_CPU)
        places = self.pool.slot_positions
        return lambda rule: prepare_prefill(spans, self.layout, self.table, rule, places)

    def _move_lists(self, rows: Sequence[DecodeRow], groups: Groups) -> DecodeLists:
        lists = self._lists
        if lists is None or lists.groups is not groups or not lists.move_to(rows):
            size = self.pool.page_size
            lists = self._lists = DecodeLists(rows, groups, page_size=size, split_keys=_SPLIT_KEYS)
            self._plans = {}
        return lists

    def _plan(self, rule: ScoreRule, lists: DecodeLists | None) -> NativePlan:
        if lists is None:
            assert self._storing is not None
            return self._storing
        if rule.window not in self._plans:
            self._plans[rule.window] = self._native_plan(rule, lists)
        return self._plans[rule.window]

    def _native_plan(self, rule: ScoreRule, lists: DecodeLists | None) -> NativePlan:
        work = None if lists is None else lists.work
        return NativePlan(
            self.rotation,
            rule,
            self.num_qo_heads,
            self.pool.layer(0)[0],
            work=work,
            slot_positions=self.pool.slot_positions,
            row_dtype=self.row_dtype,
        )

    def _torch_decode(self, lists: DecodeLists | None) -> "list[_TorchDecode | None]":
        if lists is None:
            return [None] * len(self.rules)
        work, places = lists.work, self.pool.slot_positions
        return self._per_window(
            lambda rule: _TorchDecode(
                prepared := prepare(work, self.layout, rule, places),
                self.table.at(prepared.frame_rows(work)),
                work.row_state_indptr,
            )
        )

    def _per_window(self, make: Callable[[ScoreRule], T]) -> list[T]:
        """``make(rule)`` for every layer, made once per window: rules differ in nothing else."""
        made: dict[int, T] = {}
        for rule in self.rules:
            if rule.window not in made:
                made[rule.window] = make(rule)
        return [made[rule.window] for rule in self.rules]


@dataclass(frozen=True)
class _NativeStep:
    """What the model's layers call when decode rows go through C."""

    owner: CpuAttention
    num_decode_rows: int
    prefill: list[Prefill | None]
    plans: list[NativePlan]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plan, split, prefill = self.plans[layer], self.num_decode_rows, self.prefill[layer]
        plan.point_pages(*self.owner.pool.layer(layer))
        out = torch.empty(q.shape, dtype=q.dtype)
        if split:
            plan.run(Phase.STORE | Phase.PARTIAL | Phase.MERGE, q, (k, v), out)
        else:
            plan.run(Phase.STORE, kv=(k, v))
        if prefill is not None:
            rule = self.owner.rules[layer]
            out[split:] = run_prefill(q[split:], *self.owner.memory[layer], prefill, rule).out
        return out


@dataclass(frozen=True)
class _TorchDecode:
    """The decode rows of a step under one score rule; ``turn`` has the angles of every state."""

    prepared: PreparedWork
    turn: Turn
    row_state_indptr: Tensor

    def run(self, q: Tensor, memory: tuple[Tensor, Tensor], rule: ScoreRule, out: Tensor) -> None:
        """One output a row."""
        states = run_prepared(q, memory, self.prepared, self.turn, rule)
        merge_states(states, self.row_state_indptr, out=out, implementation="reference")


@dataclass(frozen=True)
class _TorchStep:
    """What the model's layers call where there is no C compiler."""

    owner: CpuAttention
    num_decode_rows: int
    prefill: list[Prefill | None]
    decode: list[_TorchDecode | None]
    slots: Tensor
    turn: Turn

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        owner, split, size = self.owner, self.num_decode_rows, self.owner.pool.page_size
        k_pages, v_pages = owner.pool.layer(layer)
        page = torch.div(self.slots, size, rounding_mode="floor")[:, None]
        index = (page, owner.heads, (self.slots % size)[:, None])
        k_pages.index_put_(index, to_pages(turn_heads(k, self.turn), k_pages.dtype))
        v_pages.index_put_(index, to_pages(v, v_pages.dtype))
        memory, rule = owner.memory[layer], owner.rules[layer]
        decode, prefill = self.decode[layer], self.prefill[layer]
        out = torch.empty(q.shape, dtype=q.dtype)
        if decode is not None:
            decode.run(q, memory, rule, out[:split])
        if prefill is not None:
            out[split:] = run_prefill(q[split:], *memory, prefill, rule).out
        return out

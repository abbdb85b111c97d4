"""Attention over the page pool: what a model's layers call, made for one step from its rows.

Writes the step's keys and values to their slots, then answers the decode rows by work list and
merge and the new rows by span list. On the CPU the same work is done by batched products.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from looseleaf.attention.cpu_step import CpuAttention
from looseleaf.attention.groups import DecodeRow, Groups, group_rows
from looseleaf.attention.plan import AttentionPlan, PrefillChunk, make_plan
from looseleaf.errors import NativeUnavailable
from looseleaf.kv.pool import PagePool
from looseleaf.ops.dispatch import Implementation
from looseleaf.ops.merge_states import merge_states
from looseleaf.ops.partial_attention import partial_attention
from looseleaf.ops.partial_attention.native import load_attention
from looseleaf.ops.prefill_attention import prefill_attention
from looseleaf.ops.store_kv import store_kv
from looseleaf.types import Attend, Rotation, ScoreRule

_log = logging.getLogger(__name__)
# long enough to fill a tile many times over, short enough that one span feeds many processors
_SPLIT_KEYS = 512
_TILE_ROWS = 64


@dataclass
class PlanCounters:
    """What the plan chose, summed over steps: items that read settled pages, and how many of them
    serve several rows at once."""

    items: int = 0
    grouped_items: int = 0
    grouped_rows: int = 0


@dataclass(frozen=True)
class StepRows:
    """A step's rows: those that decode, then those of the chunks, and where their keys go.

    ``slots`` (flat, ``page * page_size + slot``) and ``frame_positions`` are int64 ``[rows]`` on
    the pool's device."""

    decode: Sequence[DecodeRow]
    chunks: Sequence[PrefillChunk]
    slots: Tensor
    frame_positions: Tensor


@dataclass(eq=False)
class PagedAttention:
    """Attention of one model over one pool: its rotation table and the score rule of every layer.

    The grouping of decode rows is kept while the same rows go on.
    """

    pool: PagePool
    rotation: Rotation
    rules: tuple[ScoreRule, ...]
    num_qo_heads: int
    grouping: bool = True
    implementation: Implementation = "auto"
    counters: PlanCounters = field(default_factory=PlanCounters)
    _lists: list[object] = field(default_factory=list)
    _groups: Groups = field(default_factory=lambda: Groups([], []))

    def __post_init__(self) -> None:
        self._cpu = None
        asked = self.implementation
        if asked in ("cpu", "native") or (asked == "auto" and self.pool.kv.device.type == "cpu"):
            native = asked == "native" or (asked == "auto" and self._can_compile())
            self._cpu = CpuAttention(
                self.pool, self.rotation, self.rules, self.num_qo_heads, native
            )

    @property
    def groups(self) -> Groups:
        """How the decode rows of the latest step were grouped; the same object while they stay."""
        return self._groups

    def step(self, rows: StepRows) -> Attend:
        """The attention of one step, for the model to call layer by layer."""
        groups = self._group(rows.decode)
        if self._cpu is not None:
            return self._cpu.step(
                rows.decode, groups, rows.chunks, rows.slots, rows.frame_positions
            )
        plan = make_plan(
            rows.decode,
            groups,
            rows.chunks,
            page_size=self.pool.page_size,
            split_keys=_SPLIT_KEYS,
            tile_rows=_TILE_ROWS,
            device=self.pool.kv.device,
        )
        return _OpsStep(self, plan, rows.slots, rows.frame_positions)

    def _can_compile(self) -> bool:
        """Whether the C kernels are to be had; says so where they are not."""
        try:
            load_attention(self.pool.layer(0)[0], self.num_qo_heads, self.rotation)
        except NativeUnavailable as error:
            _log.warning("decoding goes on without the C kernels, and more slowly: %s", error)
            return False
        return True

    def _group(self, rows: Sequence[DecodeRow]) -> Groups:
        """The groups of ``rows``; the same object as long as the same rows go on."""
        # a row is known by its lists; settled spans alone would not do, since all that are empty
        # are one object
        lists: list[object] = [part for row in rows for part in (row.settled, row.tail.pages)]
        same = len(lists) == len(self._lists) and all(
            new is old for new, old in zip(lists, self._lists, strict=True)
        )
        if not same:
            self._lists = lists
            self._groups = group_rows(rows, grouping=self.grouping)
        shared = [item for item in self._groups.items if len(item.entries) > 1]
        self.counters.items += len(self._groups.items)
        self.counters.grouped_items += len(shared)
        self.counters.grouped_rows += sum(len(item.entries) for item in shared)
        return self._groups


@dataclass(frozen=True)
class _OpsStep:
    """One operator call each for store, partial, merge and prefill."""

    attention: PagedAttention
    plan: AttentionPlan
    slots: Tensor
    frame_positions: Tensor

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        owner, plan, chosen = self.attention, self.plan, self.attention.implementation
        k_pages, v_pages = owner.pool.layer(layer)
        rule = owner.rules[layer]
        store_kv(k, v, self.frame_positions, self.slots, owner.rotation, k_pages, v_pages, chosen)
        out = torch.empty_like(q)
        split = plan.num_decode_rows
        if plan.work is not None:
            states = partial_attention(
                q[:split], k_pages, v_pages, plan.work, owner.rotation, rule, implementation=chosen
            )
            indptr = plan.work.row_state_indptr
            merge_states(states, indptr, out=out[:split], implementation=chosen)
        if plan.spans is not None:
            state = prefill_attention(
                q[split:], k_pages, v_pages, plan.spans, owner.rotation, rule, implementation=chosen
            )
            out[split:] = state.out
        return out

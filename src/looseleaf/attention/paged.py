"""Attention over the page pool: what a model's layers call, made for one step from its plan.

Writes the step's keys and values to their slots, then answers the decode rows by work list and
merge and the new rows by span list. On the CPU the lists are turned into batched products once per
step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from looseleaf.attention.plan import AttentionPlan
from looseleaf.kv.pool import PagePool
from looseleaf.ops.dispatch import Implementation
from looseleaf.ops.merge_states import merge_states
from looseleaf.ops.partial_attention import partial_attention
from looseleaf.ops.partial_attention.cpu import attend_rows_cpu, prepare
from looseleaf.ops.prefill_attention import prefill_attention
from looseleaf.ops.prefill_attention.cpu import prepare_prefill, run_prefill
from looseleaf.ops.rotate.cpu import make_turn, turn_heads
from looseleaf.ops.store_kv import store_kv
from looseleaf.types import Attend, Rotation, ScoreRule

T = TypeVar("T")


@dataclass(frozen=True)
class PagedAttention:
    """Attention of one model over one pool: its rotation table and the score rule of every
    layer.
    """

    pool: PagePool
    rotation: Rotation
    rules: tuple[ScoreRule, ...]
    num_qo_heads: int
    implementation: Implementation = "auto"

    def step(self, plan: AttentionPlan, slots: Tensor, frame_positions: Tensor) -> Attend:
        """The attention of one step.

        ``slots`` (flat, ``page * page_size + slot``) and ``frame_positions`` say where each row's
        key and value go, int64 ``[rows]``."""
        on_cpu = self.pool.kv.device.type == "cpu" and self.implementation in ("auto", "cpu")
        if on_cpu:
            return _CpuStep(self, plan, slots, frame_positions)
        return _OpsStep(self, plan, slots, frame_positions)


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
            merge_states(states, plan.work.row_state_indptr, out=out[:split], implementation=chosen)
        if plan.spans is not None:
            state = prefill_attention(
                q[split:], k_pages, v_pages, plan.spans, owner.rotation, rule, implementation=chosen
            )
            out[split:] = state.out
        return out


class _CpuStep:
    """Lists prepared once per step and distinct score rule, then a few whole-tensor operations a
    layer.
    """

    def __init__(
        self, attention: PagedAttention, plan: AttentionPlan, slots: Tensor, frame_positions: Tensor
    ) -> None:
        self._attention = attention
        self._split = plan.num_decode_rows
        pool = attention.pool
        num_kv_heads, page_size = pool.kv.shape[3], pool.page_size
        shape = (attention.num_qo_heads, num_kv_heads, page_size)
        self._turn = make_turn(frame_positions, attention.rotation)
        pages = torch.div(slots, page_size, rounding_mode="floor")
        self._index = (pages[:, None], torch.arange(num_kv_heads), (slots % page_size)[:, None])
        work, spans, rotation = plan.work, plan.spans, attention.rotation
        self._decode = _per_rule(
            attention.rules,
            lambda rule: None if work is None else prepare(work, shape, rotation, rule),
        )
        self._prefill = _per_rule(
            attention.rules,
            lambda rule: None if spans is None else prepare_prefill(spans, shape, rotation, rule),
        )

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_pages, v_pages = self._attention.pool.layer(layer)
        rule = self._attention.rules[layer]
        k_pages.index_put_(self._index, turn_heads(k, self._turn).to(k_pages.dtype))
        v_pages.index_put_(self._index, v.to(v_pages.dtype))
        decode, prefill, split = self._decode[layer], self._prefill[layer], self._split
        if prefill is None:
            assert decode is not None
            return attend_rows_cpu(q, k_pages, v_pages, decode, rule)
        new = run_prefill(q[split:], k_pages, v_pages, prefill, rule).out.to(q.dtype)
        if decode is None:
            return new
        return torch.cat([attend_rows_cpu(q[:split], k_pages, v_pages, decode, rule), new])


def _per_rule(rules: Sequence[ScoreRule], make: Callable[[ScoreRule], T]) -> list[T]:
    """``make(rule)`` for every layer, made once per distinct window (rules differ in nothing
    else).
    """
    made: dict[int, T] = {}
    for rule in rules:
        if rule.window not in made:
            made[rule.window] = make(rule)
    return [made[rule.window] for rule in rules]

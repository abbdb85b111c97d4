"""A step of attention on the CPU: store to pages, decode rows by work list, new rows by span.

C kernels read decode rows, one call a layer; without a C compiler batched products do. New rows use
PyTorch's flash attention span by span. A step is prepared once for all layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from looseleaf.attention.cpu_prompts import PromptReads, Prompts
from looseleaf.attention.decode_lists import DecodeLists
from looseleaf.attention.host_prefill import HostedChunk, hosted_chunks
from looseleaf.attention.plan.chunks import PrefillChunk
from looseleaf.attention.plan.groups import DecodeRow
from looseleaf.attention.query_scales import row_positions, scaled, scales_of
from looseleaf.attention.select.layer_reads import Joining, LayerReads, StepReads
from looseleaf.config import QueryScaling
from looseleaf.kv.pool import PagePool
from looseleaf.ops.add_sinks import add_sinks
from looseleaf.ops.flash.cpu import PageLayout, page_memory
from looseleaf.ops.merge_states import merge_states
from looseleaf.ops.page_dtypes import same_memory, to_pages
from looseleaf.ops.partial_attention.cpu import PreparedWork, prepare, run_prepared
from looseleaf.ops.partial_attention.native import NativePlan, PageAddresses, Phase
from looseleaf.ops.rotate.cpu import Angles, AngleTable, rotate_heads
from looseleaf.rope import map_distinct
from looseleaf.types import AttentionCall, Rotation, ScoreRule

Key = tuple[bool, ...]
# long enough for a thread, short enough to feed many threads; fixed, so that a row's sums do not
# depend on its batch
SPLIT_KEYS = 256


@dataclass(eq=False)
class CpuAttention:
    """The CPU's attention over one pool.

    ``native`` reads decode rows by C kernels. ``row_dtype`` is the dtype of queries, keys and
    values. With ``invariant`` a row's sums have the same cuts, grouped or not.
    ``query_scaling`` has the factors of queries by position."""

    pool: PagePool
    rotations: Sequence[Rotation]
    rules: tuple[ScoreRule, ...]
    num_qo_heads: int
    native: bool
    row_dtype: torch.dtype
    invariant: bool = False
    query_scaling: QueryScaling | None = None
    # by the key of the reads; plans also by the first layer with equal rotation and rule
    _lists: dict[Key, DecodeLists] = field(default_factory=dict)
    _plans: dict[tuple[Key, int], NativePlan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layout = PageLayout.of(self.pool.layer(0)[0], self.num_qo_heads)
        self.alike = _first_alike(self.rotations, self.rules)
        self.tables = map_distinct(self.rotations, AngleTable.create)
        self.memory = [
            (page_memory(k), page_memory(v))
            for k, v in (self.pool.layer(layer) for layer in range(len(self.rules)))
        ]
        self.heads = torch.arange(self.layout.num_kv_heads)
        self._prompt_reads = PromptReads(
            self.pool,
            self.memory,
            self.layout,
            self.tables,
            self.rotations,
            self.rules,
            self.alike,
            self.row_dtype,
            self.invariant,
        )
        self._calls = _Calls([], (), [])
        self._storing: dict[int, NativePlan] = {}
        self._layer_plans: list[NativePlan] = []
        # the pool's memory never moves
        self.pages_at: list[PageAddresses] = []
        if self.native:
            self._storing = {n: self._native_plan(n, None) for n in set(self.alike)}
            first, layers = self._storing[0], range(len(self.rules))
            self.pages_at = [first.find_pages(*self.pool.layer(n)) for n in layers]

    def step(
        self,
        layer_reads: Sequence[LayerReads],
        step_reads: StepReads,
        chunks: Sequence[PrefillChunk],
        logit_chunks: Sequence[PrefillChunk] | None,
        slots: Tensor,
        frame_positions: Tensor,
    ) -> "CpuStep":
        """The attention of one step, with the arguments of `looseleaf.attention.paged.StepRows`.

        ``logit_chunks`` are the chunks of the last layer, None if they are ``chunks``."""
        prompts = self._prompts(chunks, logit_chunks) if chunks or logit_chunks else None
        moved = self._move_lists({reads.key: reads for reads in layer_reads})
        num_rows = len(layer_reads[0].rows)
        scales = self._scales(layer_reads[0].rows, chunks, logit_chunks)
        if not self.native:
            return _TorchStep(
                self,
                step_reads,
                num_rows,
                prompts,
                self._torch_decode(layer_reads),
                layer_reads,
                scales,
                slots,
                map_distinct(self.tables, lambda table: table.at(frame_positions)),
            )
        if not moved or len(self._lists) != 1:
            self._layer_plans = [self._plan(n, reads) for n, reads in enumerate(layer_reads)]
        for plan in set(self._layer_plans):
            plan.point_rows(slots, frame_positions)
        plans = self._layer_plans
        return _NativeStep(self, step_reads, num_rows, prompts, plans, layer_reads, scales)

    def _scales(
        self,
        decode: Sequence[DecodeRow],
        chunks: Sequence[PrefillChunk],
        logit_chunks: Sequence[PrefillChunk] | None,
    ) -> list[Tensor | None]:
        """Factors of the queries of each layer; all None if they are 1."""
        layers, scaling = len(self.rules), self.query_scaling
        if scaling is None:
            return [None] * layers
        positions = row_positions(decode, chunks)
        if not bool((positions >= scaling.period).any()):
            return [None] * layers
        scales = [scales_of(scaling, positions, self.row_dtype)] * layers
        if logit_chunks is not None:
            positions = row_positions(decode, logit_chunks)
            scales[-1] = scales_of(scaling, positions, self.row_dtype)
        return scales

    def _prompts(
        self, chunks: Sequence[PrefillChunk], logit_chunks: Sequence[PrefillChunk] | None
    ) -> "Prompts":
        """``chunks`` prepared for all layers; the last one has only the queries of
        ``logit_chunks``."""
        layers, prompts = range(len(self.rules)), self._prompt_reads
        prefill = prompts.prepare(chunks, layers)
        hosted = list[Sequence[HostedChunk]]([()] * len(self.rules))
        if any(chunk.hosted for chunk in chunks):
            hosted = [hosted_chunks(chunks)] * len(self.rules)
        if logit_chunks is not None:
            prefill[-1] = prompts.prepare(logit_chunks, layers[-1:])[0]
            if hosted[-1]:
                hosted[-1] = hosted_chunks(logit_chunks)
        return Prompts(prompts, prefill, hosted)

    def _move_lists(self, reads_by_key: Mapping[Key, LayerReads]) -> bool:
        """Advance the lists to the rows' positions, and drop stale ones. Returns whether all lists
        are the same objects as before."""
        kept: dict[Key, DecodeLists] = {}
        moved = len(reads_by_key) == len(self._lists)
        for key, reads in reads_by_key.items():
            rows, lists = reads.rows, self._lists.get(key)
            if not rows:
                continue
            if lists is None or lists.groups is not reads.groups or not lists.move_to(rows):
                lists = DecodeLists(
                    rows, reads.groups, page_size=self.pool.page_size, split_keys=SPLIT_KEYS,
                    invariant=self.invariant,
                )  # fmt: skip
                moved = False
            kept[key] = lists
        if moved and len(kept) == len(self._lists):
            return True
        self._plans = {
            (key, alike): plan
            for (key, alike), plan in self._plans.items()
            if key in kept and kept[key] is self._lists.get(key)
        }
        self._lists = kept
        return False

    def _plan(self, layer: int, reads: LayerReads) -> NativePlan:
        lists = self._lists.get(reads.key)
        if lists is None:
            return self._storing[self.alike[layer]]
        key = reads.key, self.alike[layer]
        if key not in self._plans:
            self._plans[key] = self._native_plan(layer, lists)
        return self._plans[key]

    def calls(
        self, plans: list[NativePlan], q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> Sequence[AttentionCall]:
        """The calls of all layers, which store, read and merge; those of the last step are kept."""
        kept, tensors = self._calls, (q, k, v, out)
        same = kept.plans is plans and all(map(_is_same, kept.tensors, tensors))
        if not (same and kept.calls):
            calls = [
                plan.call(_STORE_AND_READ, q, (k, v), out, pages, rule.sinks)
                for plan, pages, rule in zip(plans, self.pages_at, self.rules, strict=True)
            ]
            self._calls = _Calls(plans, tensors, calls)
        return self._calls.calls

    def row_state_indptr(self, reads: LayerReads) -> Tensor:
        """Prefix sums of the states per row."""
        return self._lists[reads.key].work.row_state_indptr

    def _native_plan(self, layer: int, lists: DecodeLists | None) -> NativePlan:
        work = None if lists is None else lists.work
        return NativePlan(
            self.rotations[layer],
            self.rules[layer],
            self.num_qo_heads,
            self.pool.layer(0)[0],
            work=work,
            slot_positions=self.pool.slot_positions,
            row_dtype=self.row_dtype,
        )

    def _torch_decode(self, layer_reads: Sequence[LayerReads]) -> "list[_TorchDecode | None]":
        by_key: dict[tuple[Key, int], _TorchDecode] = {}
        decode: list[_TorchDecode | None] = []
        for layer, reads in enumerate(layer_reads):
            lists, key = self._lists.get(reads.key), (reads.key, self.alike[layer])
            if lists is not None and key not in by_key:
                work, slot_positions = lists.work, self.pool.slot_positions
                prepared = prepare(work, self.layout, self.rules[layer], slot_positions)
                turn = self.tables[layer].at(prepared.frame_rows(work))
                by_key[key] = _TorchDecode(prepared, turn, work.row_state_indptr)
            decode.append(by_key.get(key))
        return decode


def _first_alike(rotations: Sequence[Rotation], rules: Sequence[ScoreRule]) -> list[int]:
    """For every layer the first one with the same rotation table and score rule, sinks aside; both
    share the step's preparation."""
    first: dict[tuple[object, ...], int] = {}
    laws = [
        (id(table), rule.window, rule.softmax_scale, rule.soft_cap, id(rule.alibi_slopes))
        for table, rule in zip(rotations, rules, strict=True)
    ]
    return [first.setdefault(law, layer) for layer, law in enumerate(laws)]


# once, because a union of flags takes as long as a short kernel
_READ = Phase.PARTIAL | Phase.MERGE
_STORE_AND_READ = Phase.STORE | _READ


class _Calls(NamedTuple):
    """Calls of all layers' ``plans`` over tensors."""

    plans: list[NativePlan]
    tensors: tuple[Tensor, ...]
    calls: list[AttentionCall]


def _is_same(x: Tensor, y: Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()


@dataclass(frozen=True)
class _NativeStep:
    """A step whose decode rows are read by C kernels."""

    owner: CpuAttention
    reads: StepReads
    num_decode_rows: int
    prompts: Prompts | None
    plans: list[NativePlan]
    layer_reads: Sequence[LayerReads]
    scales: Sequence[Tensor | None]

    def __call__(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        if self.scales[layer] is not None:
            q = scaled(q, self.scales[layer])
        plan, split = self.plans[layer], self.num_decode_rows
        # a layer that shares KV has nothing to store
        kv = None if k is None or v is None else (k, v)
        store = Phase(0) if kv is None else Phase.STORE
        pages, sinks = self.owner.pages_at[layer], self.owner.rules[layer].sinks
        out = torch.empty(q.shape, dtype=q.dtype)
        if joining := self.layer_reads[layer].joining:
            for rows in joining:
                rows.begin(layer, q)
            plan.run(store | Phase.PARTIAL, q, kv, pages=pages)
            indptr = self.owner.row_state_indptr(self.layer_reads[layer])
            for rows in joining:
                rows.join(layer, q, plan.states, indptr)
            plan.run(Phase.MERGE, out=out, sinks=sinks)
        elif split:
            plan.run(_READ if kv is None else _STORE_AND_READ, q, kv, out, pages, sinks)
        elif kv is not None:
            plan.run(store, kv=kv, pages=pages)
        if self.prompts is not None:
            self.prompts.attend(layer, q[split:], out[split:])
        return out

    def calls(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Sequence[AttentionCall] | None:
        """See `looseleaf.types.NativeAttend`."""
        if self.prompts is not None or any(scale is not None for scale in self.scales):
            return None
        if not self.num_decode_rows or any(reads.joining for reads in self.layer_reads):
            return None
        return self.owner.calls(self.plans, q, k, v, out)

    def require(self, fault: int) -> None:
        """See `looseleaf.types.NativeAttend`."""
        NativePlan.require(fault)


@dataclass(frozen=True)
class _TorchDecode:
    """The decode rows of a step under one score rule; ``turn`` has the angles of every state."""

    prepared: PreparedWork
    turn: Angles
    row_state_indptr: Tensor

    def run(
        self,
        layer: int,
        q: Tensor,
        owner: CpuAttention,
        selected: Sequence[Joining],
        out: Tensor,
    ) -> None:
        """Write one output a row."""
        for joining in selected:
            joining.begin(layer, q)
        rule = owner.rules[layer]
        states = run_prepared(q, owner.memory[layer], self.prepared, self.turn, rule)
        for joining in selected:
            joining.join(layer, q, states, self.row_state_indptr)
        merged = merge_states(states, self.row_state_indptr, out=out, implementation="reference")
        if rule.sinks is not None:
            add_sinks(merged, rule.sinks, "cpu")


@dataclass(frozen=True)
class _TorchStep:
    """A step without a C compiler."""

    owner: CpuAttention
    reads: StepReads
    num_decode_rows: int
    prompts: Prompts | None
    decode: list[_TorchDecode | None]
    layer_reads: Sequence[LayerReads]
    scales: Sequence[Tensor | None]
    slots: Tensor
    turns: Sequence[Angles]

    def __call__(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        if self.scales[layer] is not None:
            q = scaled(q, self.scales[layer])
        owner, split, size = self.owner, self.num_decode_rows, self.owner.pool.page_size
        k_pages, v_pages = owner.pool.layer(layer)
        if k is not None and v is not None:
            page = torch.div(self.slots, size, rounding_mode="floor")[:, None]
            index = (page, owner.heads, (self.slots % size)[:, None])
            k_pages.index_put_(index, to_pages(rotate_heads(k, self.turns[layer]), k_pages.dtype))
            if not same_memory(k_pages, v_pages):
                v_pages.index_put_(index, to_pages(v, v_pages.dtype))
        decode = self.decode[layer]
        out = torch.empty(q.shape, dtype=q.dtype)
        if decode is not None:
            decode.run(layer, q, owner, self.layer_reads[layer].joining, out[:split])
        if self.prompts is not None:
            self.prompts.attend(layer, q[split:], out[split:])
        return out


CpuStep = _NativeStep | _TorchStep

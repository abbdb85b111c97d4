"""Attention over the page pool: the callable that a model's layers use during one step.

Each layer stores the step's keys and values. Decode rows are read by work list and merged, new rows
by span list. On the CPU batched products or C kernels do the same.
"""

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from looseleaf.attention.cpu_step import SPLIT_KEYS, CpuAttention, CpuStep
from looseleaf.attention.expanded import ExpandedRows, ExpandingStep, expanded_rows
from looseleaf.attention.host_prefill import HostedChunk, hosted_chunks
from looseleaf.attention.plan.chunks import PrefillChunk, make_span_list
from looseleaf.attention.plan.cost_model import CostModel, cost_model_of
from looseleaf.attention.plan.expanded import worth_expanding
from looseleaf.attention.plan.gathered import reads_gathered
from looseleaf.attention.plan.groups import DecodeRow, Groups, group_rows
from looseleaf.attention.plan.planner import AttentionPlan, PlanCounters, Planner
from looseleaf.attention.query_scales import scaled, scales_of
from looseleaf.attention.select.device_topk import (
    ChoiceBuffer,
    DeviceChoice,
    HostStep,
    ListedWork,
    choose_in,
    count_on_device,
)
from looseleaf.attention.select.layer_reads import Joining, LayerReads, StepReads, StepReadsBuilder
from looseleaf.config import LatentConfig, QueryScaling
from looseleaf.errors import NativeUnavailable
from looseleaf.index.host.attend import HostedAttention
from looseleaf.index.host.cpu_windows import HostedWindows
from looseleaf.index.host.gpu import DeviceWork, HostedDevice
from looseleaf.kv.pool import PagePool
from looseleaf.ops.add_sinks import add_sinks
from looseleaf.ops.dispatch import Implementation
from looseleaf.ops.finish_rows import finish_rows
from looseleaf.ops.merge_states import merge_states
from looseleaf.ops.partial_attention import WorkList, partial_attention
from looseleaf.ops.partial_attention.native import load_attention
from looseleaf.ops.prefill_attention import SpanList, prefill_attention
from looseleaf.ops.store_kv import NewRows
from looseleaf.rope import map_distinct
from looseleaf.types import Attend, AttnState, Rotation, ScoreRule

_log = logging.getLogger(__name__)
# a captured step has no reads yet
_NOT_READ = StepReads(Groups([], []))


@dataclass(frozen=True)
class StepRows:
    """A step's rows, decode rows first, then those of the chunks, and the slots of their keys.

    ``slots`` (flat, ``page * page_size + slot``) and ``frame_positions`` are int64 ``[rows]`` on
    the pool's device. ``logit_rows`` lists the rows with queries in the last layer,
    ascending: all decode rows and some of the chunks'; None for every row. ``expands``: rows of
    chunks may attend to keys expanded from latents."""

    decode: Sequence[DecodeRow]
    chunks: Sequence[PrefillChunk]
    slots: Tensor
    frame_positions: Tensor
    logit_rows: Sequence[int] | None = None
    expands: bool = False

    def logit_chunks(self) -> list[PrefillChunk]:
        """The chunks, with only the rows that have queries in the last layer."""
        assert self.logit_rows is not None, "the last layer has queries of every row"
        start, chunks = len(self.decode), []
        assert list(self.logit_rows[:start]) == list(range(start)), "decode rows need queries"
        for chunk in self.chunks:
            stop = start + len(chunk.positions)
            rows = range(bisect_left(self.logit_rows, start), bisect_left(self.logit_rows, stop))
            if rows:
                positions = [int(chunk.positions[self.logit_rows[n] - start]) for n in rows]
                chunks.append(PrefillChunk(positions, chunk.spans, chunk.hosted))
            start = stop
        return chunks


@dataclass(eq=False)
class PagedAttention:
    """Attention of one model over one pool, with the rotation table and score rule of every layer.

    Groups of decode rows are cached while the rows stay the same. With ``batch_invariant`` a row is
    split and merged the same way in every batch. ``costs`` is the cost model of a GPU, None for the
    built-in one. ``row_dtype`` is the dtype of queries, keys and values, None for the pool's.
    Layers with equal rotations share a table; all tables have equally many positions.
    ``query_scaling`` has the factors of queries by position. ``latent`` has the sizes of latent
    keys, None for keys that are not expanded."""

    pool: PagePool
    rotations: tuple[Rotation, ...]
    rules: tuple[ScoreRule, ...]
    num_qo_heads: int
    grouping: bool = True
    batch_invariant: bool = False
    implementation: Implementation = "auto"
    costs: CostModel | None = None
    row_dtype: torch.dtype | None = None
    query_scaling: QueryScaling | None = None
    latent: LatentConfig | None = None

    def __post_init__(self) -> None:
        kv, device = self.pool.kv, self.pool.kv.device
        latent, is_plain = kv.shape[1] == 1, all(rule.is_plain for rule in self.rules)
        self.planner = Planner(
            page_size=self.pool.page_size,
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=kv.shape[3],
            device=device,
            costs=self.costs or cost_model_of(device, kv.shape[5], kv.itemsize, latent=latent),
            batch_invariant=self.batch_invariant,
            finishing=not (latent or self.batch_invariant) and is_plain,
            gathering=not latent and reads_gathered(kv, self._row_dtype, self.rules),
        )
        self._cpu = None
        mode = self.implementation
        if mode in ("cpu", "native") or (mode == "auto" and self.pool.kv.device.type == "cpu"):
            native = mode == "native" or (mode == "auto" and self._can_compile())
            pool, rules, dtype = self.pool, self.rules, self._row_dtype
            num_heads, fixed = self.num_qo_heads, self.batch_invariant
            self._cpu = CpuAttention(
                pool, self.rotations, rules, num_heads, native, dtype, fixed, self.query_scaling
            )
        # the planner's costs are those of GPUs
        step = SPLIT_KEYS // self.pool.page_size if self.batch_invariant else 1
        group = self.planner.group if self._cpu is None else partial(group_rows, step=step)
        self._builder = StepReadsBuilder(
            self.pool,
            self.rotations,
            self.rules,
            lambda rows: group(rows, grouping=self.grouping),
            self.planner.page_array,
        )
        self.hosted: HostedAttention | HostedDevice | None = None
        heads, threads = (self.num_qo_heads, kv.shape[5]), torch.get_num_threads()
        if self._cpu is not None:
            self._builder.hosted = self.hosted = HostedAttention(self.rotations, threads)
            self._builder.windows = HostedWindows(self.hosted, self.rules, heads, self._row_dtype)
        elif device.type == "cuda":
            self.hosted = HostedDevice(
                self.rotations, self.rules, heads, self._row_dtype, device, threads
            )

    @property
    def num_positions(self) -> int:
        """Number of positions that the tables cover."""
        return len(self.rotations[0].cos)

    @property
    def counters(self) -> PlanCounters:
        """Decisions of the plans, summed over steps."""
        return self.planner.counters

    @property
    def _group(self) -> int:
        return self.num_qo_heads // self.pool.kv.shape[3]

    @property
    def _row_dtype(self) -> torch.dtype:
        return self.row_dtype or self.pool.kv.dtype

    def step(self, rows: StepRows) -> "CpuStep | _OpsStep | ExpandingStep":
        """The attention of one step, for the model to call layer by layer; its ``reads`` are those
        of the decode rows."""
        layer_reads, step_reads = self._read(rows.decode)
        logit_chunks = None if rows.logit_rows is None else rows.logit_chunks()
        chunks, expanded = rows.chunks, None
        if self.latent is not None and chunks and rows.expands:
            expanded = self._expanded(rows, self.latent)
            chunks = chunks if expanded is None else ()
        step: CpuStep | _OpsStep
        if self._cpu is not None:
            slots, positions = rows.slots, rows.frame_positions
            step = self._cpu.step(layer_reads, step_reads, chunks, logit_chunks, slots, positions)
        else:
            kept = replace(rows, chunks=chunks)
            step = self._planned_step(kept, layer_reads, step_reads, logit_chunks)
        if expanded is None:
            return step
        mode: Implementation = "cpu" if self._cpu is not None else self.implementation
        pages = self.pool.layer
        return ExpandingStep(step, step_reads, expanded, pages, self.rotations, self.rules, mode)

    def _expanded(self, rows: StepRows, latent: LatentConfig) -> ExpandedRows | None:
        """The rows of chunks as rows over expanded keys, None where that does not pay.

        Batch-invariant steps never expand, since the choice depends on the length of a chunk."""
        chunks, kv, itemsize = rows.chunks, self.pool.kv, self._row_dtype.itemsize
        if self.batch_invariant or not worth_expanding(chunks, latent, itemsize, kv.device.type):
            return None
        # the last layer may have few queries
        layers = len(self.rules) - (rows.logit_rows is not None)
        page_array = self.planner.page_array
        expanded = expanded_rows(chunks, self.pool.page_size, kv.device, layers, page_array)
        if expanded is not None:
            self.counters.gathered_keys += sum(int(chunk.positions[-1]) + 1 for chunk in chunks)
        return expanded

    def _planned_step(
        self,
        rows: StepRows,
        layer_reads: Sequence[LayerReads],
        step_reads: StepReads,
        logit_chunks: Sequence[PrefillChunk] | None,
    ) -> "_OpsStep":
        """The attention of ``rows`` by plans; ``logit_chunks`` are the chunks of the last layer,
        None if it has queries of every row."""
        layers = self._plans(layer_reads, rows.chunks)
        count_on_device(layer_reads)
        device = self.pool.kv.device
        prompts = [hosted_chunks(rows.chunks, device, len(rows.decode))] * len(self.rules)
        if logit_chunks is not None:
            layers[-1] = self._last_plan(layers[-1], layer_reads[-1], logit_chunks)
            prompts[-1] = hosted_chunks(logit_chunks, device, len(rows.decode))
        hosted = self.load_hosted(rows.decode, max(each.plan.num_work_rows for each in layers))
        return self._ops_step(
            step_reads, layers, (rows.slots, rows.frame_positions), hosted, prompts
        )

    def load_hosted(self, decode: Sequence[DecodeRow], rows: int) -> DeviceWork | None:
        """A GPU step's reads of host-resident segments, with room for ``rows`` rows; None without
        such reads. After the launch of the step the caller must call `sent`."""
        if not any(row.hosted for row in decode):
            return None
        assert isinstance(self.hosted, HostedDevice), "kernels without host-resident reads"
        each = ((row.position, row.hosted, row.window) for row in decode)
        return self.hosted.load(rows, *zip(*each, strict=True))

    def hosted_room(self, rows: int) -> DeviceWork:
        """Empty reads of host-resident segments for ``rows`` rows, to capture."""
        assert isinstance(self.hosted, HostedDevice), "only GPUs capture steps"
        return self.hosted.load(rows, (), ())

    def sent(self) -> None:
        """Record that the latest step is launched."""
        if isinstance(self.hosted, HostedDevice):
            self.hosted.sent()

    def settle(self) -> None:
        """Wait for the reads of host-resident segments in flight, and count them."""
        if isinstance(self.hosted, HostedDevice):
            self.hosted.settle()

    def host_step(
        self, decode: Sequence[DecodeRow], chunks: Sequence[PrefillChunk], most_rows: int
    ) -> HostStep | None:
        """The work lists of a step on the host, to replay with ``most_rows`` rows.
        None if rows need a span list, read host-resident segments whole, or choose in a way that
        no device list supports."""
        if any(chunk.hosted for chunk in chunks):
            return None
        layer_reads, step_reads = self._read(decode)
        index_of: dict[tuple[bool, ...], int] = {}
        works: list[ListedWork] = []
        group = self._group
        for reads in layer_reads:
            if reads.key not in index_of:
                finish = not reads.joining
                work = self.planner.host_work(reads.rows, reads.groups, chunks, finish=finish)
                selected, choice = reads.listed, None
                if work is None or (reads.joining and selected is None):
                    return None
                if selected is not None:
                    work, choice = choose_in(work, selected, group, most_rows, padded=True)
                index_of[reads.key] = len(works)
                works.append(ListedWork(work, choice))
        count_on_device(layer_reads)
        layers = tuple(index_of[reads.key] for reads in layer_reads)
        return HostStep(tuple(works), layers, step_reads)

    def over(
        self,
        works: Sequence[tuple[WorkList, DeviceChoice | None]],
        layers: Sequence[int],
        slots: Tensor,
        frame_positions: Tensor,
        hosted: DeviceWork | None = None,
    ) -> Attend:
        """The attention of a step whose rows are all in each of ``works``, and in ``hosted``;
        ``layers`` has the index of each layer's work list.

        Only shapes are read, so the calls can be captured, and replayed over new numbers in the
        same tensors."""
        plans = [
            _LayerPlan(AttentionPlan(len(slots), work, None), choice=choice)
            for work, choice in works
        ]
        by_layer, no_prompts = [plans[n] for n in layers], [()] * len(layers)
        return self._ops_step(_NOT_READ, by_layer, (slots, frame_positions), hosted, no_prompts)

    def over_spans(self, spans: SpanList, slots: Tensor, frame_positions: Tensor) -> Attend:
        """As `over`, for rows that are all in ``spans``."""
        plans = [_LayerPlan(AttentionPlan(0, None, spans))] * len(self.rules)
        return self._ops_step(_NOT_READ, plans, (slots, frame_positions), None, [()] * len(plans))

    def scales_at(self, positions: Tensor) -> Tensor | None:
        """Factors ``[rows, 1, 1]`` of queries at ``positions``; None for a model without them."""
        return scales_of(self.query_scaling, positions, self._row_dtype)

    def _ops_step(
        self,
        reads: StepReads,
        layers: Sequence["_LayerPlan"],
        rows: tuple[Tensor, Tensor],
        hosted: DeviceWork | None,
        prompts: Sequence[Sequence[HostedChunk]],
    ) -> "_OpsStep":
        """A step over ``layers``; ``rows`` are slots and frame positions."""
        scales: list[Tensor | None] = [None] * len(layers)
        if self.query_scaling is not None:
            scales = map_distinct(layers, lambda layer: self.scales_at(layer.plan.row_positions))
        return _OpsStep(self, reads, layers, *rows, hosted, prompts, scales)

    def _can_compile(self) -> bool:
        """Whether the C kernels are available; logs a warning if not."""
        try:
            rotation = self.rotations[0]
            load_attention(self.pool.layer(0)[0], self.num_qo_heads, rotation, self._row_dtype)
        except NativeUnavailable as error:
            _log.warning("decode runs without the C kernels, and more slowly: %s", error)
            return False
        return True

    def _plans(
        self, layer_reads: Sequence[LayerReads], chunks: Sequence[PrefillChunk]
    ) -> list["_LayerPlan"]:
        """A plan for each layer; layers with equal reads share one."""
        by_key: dict[tuple[bool, ...], _LayerPlan] = {}
        for reads in layer_reads:
            if reads.key not in by_key:
                by_key[reads.key] = self._plan(reads, chunks)
        return [by_key[reads.key] for reads in layer_reads]

    def _last_plan(
        self, same: "_LayerPlan", reads: LayerReads, chunks: Sequence[PrefillChunk]
    ) -> "_LayerPlan":
        """The plan of the last layer, with ``chunks`` for those of its reads' plan ``same``."""
        if same.choice is None:
            return self._plan(reads, chunks)
        # the list of an anchor layer has the choice for this one
        device, tiles = self.pool.kv.device, self.planner.tile_rows
        spans = make_span_list(chunks, tile_rows=tiles, device=device) if chunks else None
        return replace(same, plan=replace(same.plan, spans=spans))

    def _plan(self, reads: LayerReads, chunks: Sequence[PrefillChunk]) -> "_LayerPlan":
        selected = reads.listed
        if selected is None:
            finish = not reads.joining
            plan = self.planner.plan(reads.rows, reads.groups, chunks, finish=finish)
            return _LayerPlan(plan, reads.joining)
        host = self.planner.host_work(reads.rows, reads.groups)
        assert host is not None, "decode rows have a work list"
        device, num_rows = self.pool.kv.device, len(reads.rows)
        host, choice = choose_in(host, selected, self._group, num_rows)
        buffer = ChoiceBuffer(choice, device)
        buffer.load(choice)
        selected.tallies.extend(buffer.counts[:, : len(selected.indices)])
        work = host.to(device)
        tiles = self.planner.tile_rows
        spans = make_span_list(chunks, tile_rows=tiles, device=device) if chunks else None
        filled = DeviceChoice(work, buffer, choice.how, choice.kept)
        return _LayerPlan(AttentionPlan(num_rows, work, spans), choice=filled)

    def _read(self, rows: Sequence[DecodeRow]) -> tuple[list[LayerReads], StepReads]:
        """The reads of all layers and of the step; counts the groups."""
        layer_reads, step_reads = self._builder.of(rows)
        items = step_reads.groups.items
        if items:
            shared = [len(item.entries) for item in items if len(item.entries) > 1]
            counters = self.planner.counters
            counters.items += len(items)
            counters.grouped_items += len(shared)
            counters.grouped_rows += sum(shared)
        return layer_reads, step_reads


@dataclass(frozen=True)
class _LayerPlan:
    """The plan of a layer; chosen pages are in the plan's own list (``choice``), or join as states
    (``joining``)."""

    plan: AttentionPlan
    joining: Sequence[Joining] = ()
    choice: DeviceChoice | None = None


@dataclass(frozen=True)
class _OpsStep:
    """Calls one operator each for store, partial, merge and prefill."""

    attention: PagedAttention
    reads: StepReads
    layers: Sequence[_LayerPlan]
    slots: Tensor
    frame_positions: Tensor
    hosted: DeviceWork | None
    prompts: Sequence[Sequence[HostedChunk]]
    scales: Sequence[Tensor | None]

    def __call__(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        owner, mode = self.attention, self.attention.implementation
        plan, choice = self.layers[layer].plan, self.layers[layer].choice
        k_pages, v_pages = owner.pool.layer(layer)
        rotation, rule = owner.rotations[layer], owner.rules[layer]
        slot_positions = owner.pool.slot_positions
        split = plan.num_work_rows
        if self.scales[layer] is not None:
            q = scaled(q, self.scales[layer])
        if self.hosted is not None and len(q):
            self.hosted.begin(layer, q[:split])
        rows = None
        if k is not None and v is not None:
            rows = NewRows(k, v, self.frame_positions, self.slots, k_pages, v_pages)
        # candidate pages are final, so their scores need not wait for the store
        store_with_scores = choice is not None and plan.spans is None
        if rows is not None and not store_with_scores:
            rows.store(rotation, mode)
        if not len(q):
            return q
        new = None
        if plan.spans is not None:
            spans = plan.spans
            patch = slot_positions if spans.mask_words.numel() else None
            new = prefill_attention(q[split:], k_pages, v_pages, spans, rotation, rule, patch, mode)
            if split == 0:
                return self._completed(layer, q, new)
        out = torch.empty_like(q)
        lse = None
        if plan.work is not None:
            work = plan.work
            if choice is not None:
                choice.fill(layer, q[:split], rows if store_with_scores else None, mode)
                work = choice.filled
            states = self._states(layer, q[:split], work)
            if work.whole and split == len(q):
                return self._completed(layer, q, states)
            indptr = work.row_state_indptr
            for selected in self.layers[layer].joining:
                selected.join(layer, q, states, indptr)
            kept = None if choice is None else choice.kept(layer)
            carried = None if self.hosted is None else self.hosted.join()
            if carried is not None and kept is not None:
                # a row continues from one state, so the kept one is merged first
                states = merge_states(
                    states, indptr, kept=kept, implementation=mode, indptr_ready=True
                )
                numbers = torch.arange(len(states.lse) + 1, dtype=torch.int32, device=q.device)
                indptr, kept = numbers, None
            if work.finishing:
                assert carried is None and kept is None, "finished rows have no further states"
                pages = k_pages, v_pages
                lse = finish_rows(
                    states, q[:split], pages, work, rotation, rule, out[:split], mode
                ).lse
            else:
                lse = merge_states(
                    states, indptr, carried, out[:split], kept, mode, indptr_ready=True
                ).lse
        if new is not None:
            out[split:] = new.out
        if not self.prompts[layer] and rule.sinks is None:
            return out
        lses = [lse for lse in (lse, None if new is None else new.lse) if lse is not None]
        lse = lses[0] if len(lses) == 1 else torch.cat(lses)
        return self._completed(layer, q, AttnState(out, lse))

    def _states(self, layer: int, q: Tensor, work: WorkList) -> AttnState:
        """The partial states of a work list's rows."""
        owner = self.attention
        k_pages, v_pages = owner.pool.layer(layer)
        patch = owner.pool.slot_positions if work.mask_words.numel() else None
        rotation, rule = owner.rotations[layer], owner.rules[layer]
        return partial_attention(
            q, k_pages, v_pages, work, rotation, rule, patch, owner.implementation
        )

    def _completed(self, layer: int, q: Tensor, state: AttnState) -> Tensor:
        """The output of all rows, after prompt rows joined their reads outside of the pool, and
        all rows their sinks."""
        owner, rule = self.attention, self.attention.rules[layer]
        for chunk in self.prompts[layer]:
            chunk.join(layer, q, state, rule, owner.rotations[layer])
        if rule.sinks is not None:
            add_sinks(state, rule.sinks, owner.implementation)
        return state.out

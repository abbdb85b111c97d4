"""The runner: it turns scheduled work into tensors, runs the model, and returns logits.

Only the runner and the sampler use tensors. Host work happens once a step, and all layers share it.
On a GPU steps of few rows replay as graphs, and the host never waits for the device."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Int
from torch import Tensor

from looseleaf.attention.paged import PagedAttention, StepRows
from looseleaf.attention.plan.calibration import OnLaunch, Shape, costs_of
from looseleaf.attention.plan.chunks import is_patched
from looseleaf.attention.plan.cost_model import CostModel
from looseleaf.attention.plan.groups import DecodeRow
from looseleaf.attention.plan.probe import DeviceProbe
from looseleaf.blend.fusion import Fusion
from looseleaf.blend.scoring_graphs import ScoringGraphs
from looseleaf.blend.token_scoring import TokenScoring
from looseleaf.config import CacheConfig, EngineConfig
from looseleaf.engine.runner.microbatches import (
    join_reads,
    logit_rows,
    microbatch_of,
    microbatches_of,
    parted,
    rows_in_microbatches,
)
from looseleaf.engine.runner.step import PassTimer, Step, prepare_step
from looseleaf.engine.runner.warmup import rehearsal, warming
from looseleaf.engine.scheduler import StepWork
from looseleaf.engine.tiering.compute_time import ComputeTime
from looseleaf.errors import InvalidOption
from looseleaf.graphs.decode import StepGraphs
from looseleaf.graphs.layerwise import LayerwiseWait, enter_late
from looseleaf.graphs.prefill import MAX_ROWS
from looseleaf.graphs.rows import arrived_tokens, to_device
from looseleaf.graphs.step_result import StepResult
from looseleaf.kv.pool import PagePool
from looseleaf.machine.limits import available_memory
from looseleaf.models import Decoder
from looseleaf.ops.compile_ahead import skipped_kernels
from looseleaf.ops.dispatch import Implementation
from looseleaf.ops.page_dtypes import FP8
from looseleaf.rope.frames import layer_rotations, softmax_scale
from looseleaf.sparse import BreakEven
from looseleaf.types import Attend, ScoreRule

OnProgress = Callable[[str, int, int], None]
"""Called with the stage of a long job, its completed items and their total."""

_GIB = 1 << 30


@dataclass(frozen=True)
class Runner:
    """A model with its pool and attention on one device.

    ``graphs`` and ``passes`` are None where steps do not replay. With ``runs_ahead`` a step may run
    before the tokens of the previous one have reached the host. ``compute_time`` observes steps
    that prefill or blend."""

    model: Decoder
    pool: PagePool
    attention: PagedAttention
    graphs: StepGraphs | None = None
    passes: ScoringGraphs | None = None
    runs_ahead: bool = False
    compute_time: ComputeTime | None = None

    @classmethod
    def create(
        cls,
        model: Decoder,
        config: EngineConfig,
        max_model_len: int,
        implementation: Implementation = "auto",
        on_progress: OnProgress = lambda stage, completed, total: None,
    ) -> "Runner":
        """A runner whose pool has the size of ``config.cache``, or the size that fits the device.

        ``on_progress`` is called during the measurement of attention costs, if configured."""
        shape, on_gpu = model.config, model.device.type == "cuda"
        sequences = config.concurrent_sequences(on_gpu)
        # measured before the pool takes the free memory
        costs = None
        if config.attention_costs == "measured":
            costs = _measured_costs(model, config, partial(on_progress, "costs of attention"))
        num_pages = _pool_pages(config.cache, sequences, model, max_model_len)
        if model.ranks is not None:
            # plans depend on both
            own, link = costs, model.ranks.link
            costs = link.decide("attention costs", lambda: own)
            num_pages = link.agree("pages", num_pages, min)
        pool = PagePool(
            num_pages=num_pages,
            page_size=config.cache.page_size,
            num_layers=shape.num_stored_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            planes=shape.kv_planes,
            dtype=pool_dtype(model, config.cache),
            device=model.device,
        )
        pool.share_layers([shape.kv_layer(layer) for layer in range(shape.num_layers)])
        attention = PagedAttention(
            pool=pool,
            rotations=layer_rotations(shape, max_model_len, model.device),
            rules=_score_rules(model),
            num_qo_heads=shape.num_qo_heads,
            grouping=config.scheduler.grouping,
            batch_invariant=config.scheduler.batch_invariant,
            implementation=implementation,
            costs=costs,
            row_dtype=model.dtype,
            query_scaling=shape.query_scaling,
            latent=shape.latent,
        )
        graphs = passes = None
        if on_gpu and config.cuda_graphs and implementation in ("auto", "triton"):
            graphs = StepGraphs(model, attention, sequences)
            # a padded pass may round differently
            passes = None if attention.batch_invariant else ScoringGraphs(model, attention)
        observes = config.tiers.any or config.step_goal(on_gpu) is not None
        compute_time = ComputeTime() if observes else None
        return cls(
            model, pool, attention, graphs, passes, runs_ahead=on_gpu, compute_time=compute_time
        )

    @property
    def break_even(self) -> BreakEven | None:
        """The number of tokens from which page selection is faster; None on a CPU."""
        if not self.runs_ahead:
            return None
        costs, pool = self.attention.planner.costs, self.pool
        return BreakEven.of(costs, pool.kv.shape[3], pool.page_size)

    @property
    def captures(self) -> list[StepGraphs | ScoringGraphs]:
        """The owners of captured graphs."""
        return [graphs for graphs in (self.graphs, self.passes) if graphs is not None]

    @property
    def num_graphs(self) -> int:
        """Graphs captured so far."""
        return sum(graphs.num_captured for graphs in self.captures)

    @property
    def replayed_rows(self) -> int | None:
        """The most rows of a replayed pass whose documents load; None on a CPU."""
        if not self.runs_ahead:
            return None
        return 0 if self.passes is None else MAX_ROWS

    def warm_up(self, on_progress: OnProgress = lambda stage, completed, total: None) -> None:
        """Compile all kernels and capture the graphs of usual steps, with ``on_progress``.

        Without this call each kernel and graph is prepared at its first use. On a CPU this returns
        immediately."""
        ranks = self.model.ranks
        if self.graphs is None:
            return
        if ranks is None:
            self._warm_up(self.graphs, on_progress)
            return
        with ranks.link.command("runner.warm_up"):
            self._warm_up(self.graphs, on_progress)

    def _warm_up(self, graphs: StepGraphs, on_progress: OnProgress) -> None:
        """`warm_up` on this rank."""
        if self.model.device.type == "cuda":
            self._compile_kernels(on_progress)
        jobs = warming(self.model, self.attention, graphs, self.passes)
        for completed, job in enumerate(jobs):
            on_progress("graphs", completed, len(jobs))
            job()
        on_progress("graphs", len(jobs), len(jobs))

    def _compile_kernels(self, on_progress: OnProgress) -> None:
        """Compile the kernels of the warmup together, on all cores."""
        assert self.graphs is not None, "a CPU compiles no kernels"
        on_progress("kernels", 0, 1)
        sequences, with_passes = self.graphs.max_num_seqs, self.passes is not None
        with skipped_kernels() as kernels:
            for job in rehearsal(self.model, self.attention, sequences, with_passes=with_passes):
                job()
        kernels.compile(os.cpu_count() or 1)
        on_progress("kernels", 1, 1)

    @torch.inference_mode()
    def run(self, work: StepWork, previous: Int[Tensor, " sampled"] | None = None) -> StepResult:
        """Compute a step.

        ``previous`` replaces the placeholders of `awaited_token`. On a GPU the call returns before
        the step is computed, and a later call may overwrite the logits. Token scoring of
        ``work.choosing`` waits for the device. Layers wait for documents that still load. If a load
        fails, the call raises its error and the step has no effect."""
        if not work.choosing:
            return self._run(work, previous)
        launched, result = self._choose(work), self._run(work, previous)
        return replace(result, launched=launched or result.launched)

    def _run(self, work: StepWork, previous: Int[Tensor, " sampled"] | None) -> StepResult:
        """`run` of a step after token scoring."""
        if work.chunks and self.graphs is not None and self.passes is not None:
            parts = parted(work)
            if parts is not None:
                return self._run_both(work, parts, previous)
        if not work.decode and not work.chunks:
            device = self.model.device
            return StepResult.of_chunks(torch.empty(0, self.model.config.vocab_size, device=device))
        new_rows = sum(chunk.num_rows for chunk in work.chunks) if work.chunks else 0
        outputs = [sequence.decode_rows(len(work.decode), new_rows) for sequence in work.decode]
        if self.graphs is not None and any(sequence.features for sequence in work.decode):
            microbatches = microbatches_of(outputs)
            if len(microbatches) > 1:
                return self._run_microbatches(work, outputs, microbatches, previous)
        return self._compute(work, outputs, previous)

    def _compute(
        self,
        work: StepWork,
        outputs: Sequence[Sequence[DecodeRow]],
        previous: Int[Tensor, " sampled"] | None,
    ) -> StepResult:
        """`run` of one microbatch; ``outputs`` has the rows of every decoding output."""
        step = prepare_step(work, outputs, self.pool.page_size)
        late = bool(step.fusions) and self.passes is not None and self.passes.has_units
        if step.fusions and not late:
            self._place(step.fusions)
        result = None
        if step.replays and (self.graphs is not None or self.passes is not None):
            result = self._replay(step, previous)
        if late:
            self._place(step.fusions)
        if result is None:
            result = self._launch(step, previous)
        for feature, rows in step.features:
            if isinstance(rows.read, DecodeRow):
                feature.launched()
        return result

    def _launch(self, step: Step, previous: Int[Tensor, " sampled"] | None) -> StepResult:
        """Compute a step kernel by kernel: wrap its attention, pass the layers, observe."""
        device, rows, last_rows = self.model.device, step.rows, None
        tokens, slots, places = rows.to(device)
        if previous is not None:
            tokens = arrived_tokens(tokens, previous)
        if rows.logit_rows is not None and not step.sees_queries:
            last_rows = rows.last_rows
        # features that wrap the attention have no replays
        expands = not step.features or all(feature.replays for feature, _ in step.features)
        paged = self.attention.step(
            StepRows(step.decode, step.chunks, slots, places, last_rows, expands)
        )
        attend: Attend = paged
        for feature, its_rows in step.features:
            attend = feature.wrap(attend, its_rows, last_rows)
        # decode rows use other kernels, which are much faster per row, so they are not timed
        timer = None
        if self.compute_time is not None and step.chunks:
            timer = PassTimer(self.compute_time, device)
        layerwise = None
        if step.awaited:
            layerwise = LayerwiseWait(
                attend, step.awaited, self.runs_ahead and self.compute_time is not None
            )
            attend = layerwise
        hook, hooked = None, None
        if step.late_rows:
            hook, hooked = enter_late(step.late_rows, slots), [e.layer for e in step.late_rows]
        index = None if last_rows is None else rows.last_rows_on(device)
        launched = time.perf_counter()
        hidden = self.model.forward(tokens, attend, hook, index, hooked)
        if step.features and any(row.hosted for row in step.decode):
            self.attention.sent()
        for scored in step.scored:
            scored.take(hidden, self.model.logits)
        if rows.logit_rows is not None:
            if last_rows is None:
                hidden = hidden.index_select(0, rows.last_rows_on(device))
            hidden = rows.without_past(hidden)
        logits = self.model.logits(hidden)
        if timer is not None:
            timer.end(step, layerwise)
        return StepResult(logits, *paged.reads, launched)

    def _run_both(
        self,
        work: StepWork,
        parts: tuple[StepWork, StepWork],
        previous: Int[Tensor, " sampled"] | None,
    ) -> StepResult:
        """Compute a step in its two parts; only the first has decode rows."""
        rest = self._run(parts[0], previous)
        # the second part may replay as a step too, and graphs of steps share their memory
        rest_logits = rest.logits.clone()
        both = torch.cat([rest_logits, self._run(parts[1], None).logits])
        return replace(rest, logits=_ordered(both, logit_rows(work)))

    def _run_microbatches(
        self,
        work: StepWork,
        outputs: Sequence[Sequence[DecodeRow]],
        microbatches: Sequence[Sequence[int]],
        previous: Int[Tensor, " sampled"] | None,
    ) -> StepResult:
        """Compute a step whose outputs have several policies, one microbatch per policy."""
        logits, results = list[Tensor](), list[tuple[Sequence[int], StepResult]]()
        for microbatch in microbatches:
            part = microbatch_of(work, microbatch, first=not logits)
            result = self._compute(part, [outputs[row] for row in microbatch], previous)
            # the next microbatch may replay the same graph
            logits.append(result.logits.clone())
            results.append((microbatch, result))
        ending = sum(chunk.ends_prompt for chunk in work.chunks)
        rows = rows_in_microbatches(microbatches, ending)
        return join_reads(results, _ordered(torch.cat(logits), rows))

    def _place(self, fusions: Sequence[Fusion]) -> None:
        """Store the positions of patches whose pass begins. Only decode rows read them; lists in
        units already state how much of a patch each row sees."""
        for fusion in fusions:
            assert fusion.positions is not None, "a pass begins when they are chosen"
            self.pool.set_positions(fusion.pages, fusion.positions)

    def _choose(self, work: StepWork) -> float | None:
        """Run token scoring; returns the time of its first launch."""
        awaited = [arriving for s in work.choosing for arriving in s.arriving()]
        fusions = [s.fusion for s in work.choosing if s.fusion is not None]
        return TokenScoring(self.model, self.attention, awaited, self.passes).choose(fusions)

    def _replay(self, step: Step, previous: Int[Tensor, " sampled"] | None) -> StepResult | None:
        """The result of a replayed step; None if no graph fits."""
        chunks, in_parts = step.chunks, False
        if self.passes is not None and not step.decode:
            in_parts = self.passes.sooner(chunks)
        patched = bool(chunks) and is_patched(chunks)
        if self.graphs is not None and not (step.awaited or step.late_rows or in_parts or patched):
            result = self.graphs.run(step.rows, step.decode, chunks, previous)
            if result is not None:
                return result
        if self.passes is None or step.decode or not (step.awaited or patched or in_parts):
            return None
        timer = None
        if patched and not step.awaited and self.compute_time is not None:
            timer = PassTimer(self.compute_time, self.model.device)
        result = self.passes.run(step.rows, chunks, step.awaited, step.late_rows)
        if result is not None and timer is not None:
            timer.end_replay(step)
        return result


def _ordered(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """The logits of ``rows``, in their order."""
    return logits.index_select(0, to_device(torch.tensor(rows), logits.device))


def pool_dtype(model: Decoder, cache: CacheConfig) -> torch.dtype:
    """The dtype of stored keys and values of ``model``."""
    return FP8 if cache.kv_dtype == "fp8" else model.dtype


def _measured_costs(model: Decoder, config: EngineConfig, on_launch: OnLaunch) -> CostModel:
    """The attention costs of the model's device; built-in costs, with a warning, if the
    measurement fails."""
    shape, dtype = model.config, pool_dtype(model, config.cache)
    layout = Shape(
        shape.num_qo_heads,
        shape.num_kv_heads,
        shape.head_dim,
        page_size=config.cache.page_size,
        dtype=model.dtype,
        kv_dtype=dtype,
        latent=shape.latent is not None,
        rotary_dim=shape.rope.rotary_dim,
    )
    return costs_of(model.device, layout, make_probe=DeviceProbe, on_launch=on_launch).model


def _score_rules(model: Decoder) -> tuple[ScoreRule, ...]:
    shape = model.config
    return tuple(
        ScoreRule(
            softmax_scale(shape, index),
            soft_cap=shape.soft_cap,
            window=shape.window(index),
            sinks=layer.sinks,
        )
        for index, layer in enumerate(model.weights.layers)
    )


def _pool_pages(cache: CacheConfig, sequences: int, model: Decoder, max_model_len: int) -> int:
    if cache.num_pages is not None:
        return cache.num_pages
    shape = model.config
    per_token = shape.kv_planes * shape.num_stored_layers * shape.num_kv_heads * shape.head_dim
    per_page = per_token * pool_dtype(model, cache).itemsize * cache.page_size
    if cache.memory_gib is not None:
        pages = int(cache.memory_gib * _GIB) // per_page
        if pages == 0:
            raise InvalidOption(
                f"memory_gib={cache.memory_gib} does not hold a page of {per_page} bytes: raise it",
                "memory_gib",
            )
        return pages
    # at most all sequences at full length, doubled for idle documents
    most = 2 * sequences * -(-max_model_len // cache.page_size)
    return max(1, min(most, _spare_bytes(model.device) // per_page))


def _spare_bytes(device: torch.device) -> int:
    """The default size of a pool in bytes: most of a GPU's free memory, or a quarter of the memory
    of the machine or container."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * 0.85)
    return int(available_memory() * 0.25)

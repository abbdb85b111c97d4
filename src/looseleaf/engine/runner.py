"""Runs a step on the device: from scheduled work to tensors, through the model, to logits.

The only part of the engine that touches tensors besides the sampler. Host work is done once a step;
the layers share it. On a GPU steps of few rows replay as graphs, and nothing waits for the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.attention.apart import ApartStep
from looseleaf.attention.calibration import OnLaunch, Shape, costs_of
from looseleaf.attention.chunks import PrefillChunk, is_patched
from looseleaf.attention.cost_model import CostModel
from looseleaf.attention.groups import DecodeRow, Groups
from looseleaf.attention.paged import PagedAttention, StepRows
from looseleaf.attention.probe import DeviceProbe
from looseleaf.attention.readings import SelectedRows
from looseleaf.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from looseleaf.engine.entering import Entering, enter_late, find_entering
from looseleaf.engine.eviction import Tapped, find_taps
from looseleaf.engine.evidence import Evidence
from looseleaf.engine.following import Following
from looseleaf.engine.fusion import Fusion
from looseleaf.engine.graphs import StepGraphs
from looseleaf.engine.machine_limits import available_memory
from looseleaf.engine.pace import ComputePace, count_read, passes_over
from looseleaf.engine.pass_graphs import MAX_ROWS, PassGraphs
from looseleaf.engine.rows import RowInputs, arrived_tokens, step_rows, to_device
from looseleaf.engine.rows_apart import rows_apart
from looseleaf.engine.scheduler import StepWork
from looseleaf.engine.step_parts import (
    joined_reads,
    logit_places,
    parted,
    places_in_turns,
    turn_of,
    turns_of,
)
from looseleaf.engine.warming import warming
from looseleaf.errors import InvalidOption
from looseleaf.kv.pool import PagePool
from looseleaf.kv.store import Arriving
from looseleaf.models import Decoder
from looseleaf.ops.dispatch import Implementation
from looseleaf.ops.page_dtypes import FP8
from looseleaf.rope.frames import layer_rotations, softmax_scale
from looseleaf.sparse import BreakEven
from looseleaf.types import ScoreRule

OnProgress = Callable[[str, int, int], None]
"""Hears the stage of a long job, how much of it is done, and of how much."""

_GIB = 1 << 30
_MOSTLY = 0.9


@dataclass(frozen=True)
class Runner:
    """A model with its pool and attention on one device.

    ``graphs`` and ``passes`` are None where steps do not replay. With ``runs_ahead`` a step may be
    run before the tokens of the last one have arrived. ``pace`` hears how long steps take that
    prefill or blend.
    """

    model: Decoder
    pool: PagePool
    attention: PagedAttention
    graphs: StepGraphs | None = None
    passes: PassGraphs | None = None
    runs_ahead: bool = False
    pace: ComputePace | None = None

    @classmethod
    def create(
        cls,
        model: Decoder,
        config: EngineConfig,
        max_model_len: int,
        implementation: Implementation = "auto",
        on_progress: OnProgress = lambda stage, done, total: None,
    ) -> "Runner":
        """A runner whose pool has the size that ``config.cache`` asks for, or what fits the
        device. ``on_progress`` hears how far measuring costs is, if that is asked for.
        """
        shape = model.config
        # before the pool takes what memory there is
        costs = None
        if config.attention_costs == "measured":
            costs = _measured_costs(model, config, partial(on_progress, "costs of attention"))
        pool = PagePool(
            num_pages=_pool_pages(config.cache, config.scheduler, model, max_model_len),
            page_size=config.cache.page_size,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=pool_dtype(model, config.cache),
            device=model.device,
        )
        attention = PagedAttention(
            pool=pool,
            rotations=layer_rotations(shape, max_model_len, model.device),
            rules=_score_rules(shape),
            num_qo_heads=shape.num_qo_heads,
            grouping=config.scheduler.grouping,
            batch_invariant=config.scheduler.batch_invariant,
            implementation=implementation,
            costs=costs,
            row_dtype=model.dtype,
        )
        on_gpu = model.device.type == "cuda"
        graphs = passes = None
        if on_gpu and config.cuda_graphs and implementation in ("auto", "triton"):
            graphs = StepGraphs(model, attention, config.scheduler.max_num_seqs)
            # a padded pass may have other bits
            passes = None if attention.batch_invariant else PassGraphs(model, attention)
        pace = ComputePace() if config.tiers.any else None
        return cls(model, pool, attention, graphs, passes, runs_ahead=on_gpu, pace=pace)

    @property
    def break_even(self) -> BreakEven | None:
        """From how many tokens on choosing pages is faster; None on a CPU, where nothing is read
        whole unless it is asked for."""
        if not self.runs_ahead:
            return None
        costs, pool = self.attention.planner.costs, self.pool
        return BreakEven.of(costs, pool.kv.shape[3], pool.page_size)

    @property
    def num_graphs(self) -> int:
        """Graphs captured so far."""
        return sum(held.num_captured for held in (self.graphs, self.passes) if held is not None)

    @property
    def replayed_rows(self) -> int | None:
        """Up to how many rows passes behind loads replay; None where nothing is launched."""
        if not self.runs_ahead:
            return None
        return 0 if self.passes is None else MAX_ROWS

    def warm_up(self, on_progress: OnProgress = lambda stage, done, total: None) -> None:
        """Compile all kernels and capture the graphs of usual steps; ``on_progress`` hears how much
        is done, of how much.

        Otherwise each is made ready when it is first needed. On a CPU there is nothing to do.
        """
        if self.graphs is None:
            return
        jobs = warming(self.model, self.attention, self.graphs, self.passes)
        for done, job in enumerate(jobs):
            on_progress("graphs", done, len(jobs))
            job()
        on_progress("graphs", len(jobs), len(jobs))

    @torch.inference_mode()
    def run(
        self, work: StepWork, previous: Int[Tensor, " sampled"] | None = None
    ) -> Float[Tensor, "rows vocab_size"]:
        """Compute a step. The logits are of the decode rows, then of chunks that end a prompt.

        ``previous`` has the tokens that `awaited_token` stands for. On a GPU the call returns
        before the step is computed, and a later call may overwrite the logits; not so if it has
        sequences that choose tokens, which waits for the device. Where its rows read documents that
        are still arriving, each layer waits for its keys and values, and the call raises what that
        does; then the step is as if it had not been run.
        """
        if work.choosing:
            self._choose(work)
        parts = None if self.graphs is None or self.passes is None else parted(work)
        if parts is not None:
            return self._run_both(work, parts, previous)
        if not work.decode and not work.chunks:
            return torch.empty(0, self.model.config.vocab_size, device=self.model.device)
        new_rows = sum(chunk.stop - chunk.start for chunk in work.chunks)
        each = [sequence.decode_rows(len(work.decode), new_rows) for sequence in work.decode]
        turns = turns_of(each) if self.graphs is not None else []
        if len(turns) > 1:
            return self._run_in_turn(work, each, turns, previous)
        return self._compute(work, each, previous)

    def _compute(
        self,
        work: StepWork,
        each: Sequence[Sequence[DecodeRow]],
        previous: Int[Tensor, " sampled"] | None,
    ) -> Float[Tensor, "rows vocab_size"]:
        """`run` of all that is replayed or launched together; ``each`` has the rows of every output
        that decodes."""
        placed_late = self.passes is not None and self.passes.has_units
        if not placed_late:
            self._place(work)
        awaited = [arriving for chunk in work.chunks for arriving in chunk.awaits()]
        new_rows = sum(chunk.stop - chunk.start for chunk in work.chunks)
        decode = [some[0] for some in each] + [row for some in each for row in some[1:]]
        rows = step_rows(work, self.pool.page_size, [len(some) - 1 for some in each])
        chunks = [chunk.prefill() for chunk in work.chunks]
        entering = find_entering(work.chunks, rows.num_rows - new_rows)
        apart, taps = list(rows_apart(work, decode, chunks)), find_taps(work, len(decode))
        logits = None
        if not apart and not taps:
            logits = self._replay(rows, decode, chunks, previous, awaited, entering)
        if placed_late:
            self._place(work)
        if logits is not None:
            _book(work)
            return logits
        tokens, slots, places = rows.to(self.model.device)
        if previous is not None:
            tokens = arrived_tokens(tokens, previous)
        # the queries of all rows are watched, in the last layer too
        asked = None if taps else rows.asked
        attend = self.attention.step(StepRows(decode, chunks, slots, places, asked))
        if apart:
            attend = ApartStep(self.attention, attend, apart, asked)
        following = Following(attend, awaited, timed=self.pace is not None and self.runs_ahead)
        if awaited:
            attend = following
        if taps:
            attend = Tapped(attend, taps)
        # rows that only decode take another way, in a fraction of the time of as many new ones
        pace = self.pace if work.chunks else None
        begun = None if pace is None else pace.begin(self.model.device)
        index = None if asked is None else rows.asked_on(self.model.device)
        hook = enter_late(entering, slots)
        self.attention.planner.launching()
        hidden = self.model.forward(tokens, attend, hook, index, [e.layer for e in entering])
        self.attention.sent()
        if taps and rows.asked is not None:
            hidden = hidden.index_select(0, rows.asked_on(self.model.device))
        _book(work)
        logits = self.model.logits(rows.without_past(hidden))
        if pace is not None and begun is not None:
            blended = [c.stop - c.start for c in work.chunks if isinstance(c.target, Fusion)]
            if isinstance(begun, float):
                begun += following.waited
            # of a pass beside much else nobody knows how long it took
            if not blended or sum(blended) > _MOSTLY * rows.num_rows:
                pairs, waits, blends = _pairs(decode, chunks), following.waits, passes_over(chunks)
                pace.end(begun, rows.num_rows, pairs, blends=blends, waits=waits)
        return logits

    def _run_both(
        self,
        work: StepWork,
        parts: tuple[StepWork, StepWork],
        previous: Int[Tensor, " sampled"] | None,
    ) -> Float[Tensor, "rows vocab_size"]:
        """Compute a step in its two parts."""
        # the second part may replay as a step too, and graphs of steps share their memory
        rest, attention = self.run(parts[0], previous).clone(), self.attention
        reads = attention.groups, attention.selected
        both = torch.cat([rest, self.run(parts[1])])
        # nothing decodes in a pass
        attention.groups, attention.selected = reads
        return _ordered(both, logit_places(work))

    def _run_in_turn(
        self,
        work: StepWork,
        each: Sequence[Sequence[DecodeRow]],
        turns: Sequence[Sequence[int]],
        previous: Int[Tensor, " sampled"] | None,
    ) -> Float[Tensor, "rows vocab_size"]:
        """Compute a step whose outputs choose by several policies, those of each in turn."""
        found, read = list[Tensor](), list[tuple[Sequence[int], Groups, Sequence[SelectedRows]]]()
        for turn in turns:
            part, rows = turn_of(work, turn, first=not found), [each[place] for place in turn]
            # the next turn may replay the same graph
            found.append(self._compute(part, rows, previous).clone())
            read.append((turn, self.attention.groups, self.attention.selected))
        self.attention.groups, self.attention.selected = joined_reads(read)
        ending = sum(chunk.ends_prompt for chunk in work.chunks)
        return _ordered(torch.cat(found), places_in_turns(turns, ending))

    def _place(self, work: StepWork) -> None:
        """Say where the keys of patches stand that are begun. A list in units says itself how much
        of a patch each row sees: only who decodes behind it asks."""
        for chunk in work.chunks:
            if isinstance(chunk.target, Fusion) and chunk.start == 0:
                assert chunk.target.positions is not None, "a pass begins when they are chosen"
                self.pool.place(chunk.target.pages, chunk.target.positions)

    def _choose(self, work: StepWork) -> None:
        """Have the sequences that choose tokens know them."""
        awaited = [arriving for s in work.choosing for arriving in s.arriving()]
        fusions = [s.fusion for s in work.choosing if s.fusion is not None]
        Evidence(self.model, self.attention, awaited, self.passes).choose(fusions)

    def _replay(
        self,
        rows: RowInputs,
        decode: Sequence[DecodeRow],
        chunks: Sequence[PrefillChunk],
        previous: Int[Tensor, " sampled"] | None,
        awaited: Sequence[Arriving],
        entering: Sequence[Entering],
    ) -> Tensor | None:
        """The logits of a step for which there are graphs, else None."""
        in_parts = self.passes is not None and not decode and self.passes.sooner(chunks)
        patched = is_patched(chunks)
        if self.graphs is not None and not (awaited or entering or in_parts or patched):
            logits = self.graphs.run(rows, decode, chunks, previous)
            if logits is not None:
                return logits
        if self.passes is None or decode or not (awaited or patched or in_parts):
            return None
        begun = None
        if patched and not awaited and self.pace is not None:
            begun = self.pace.begin(self.model.device)
        logits = self.passes.run(rows, chunks, awaited, entering)
        if logits is not None and begun is not None and self.pace is not None:
            blends = passes_over(chunks)
            self.pace.end(begun, rows.num_rows, _pairs(decode, chunks), blends=blends)
        return logits


def _ordered(logits: Tensor, places: Sequence[int]) -> Tensor:
    """The logits at ``places``."""
    return logits.index_select(0, to_device(torch.tensor(places), logits.device))


def _book(work: StepWork) -> None:
    """What the launched step reads is seen by the rows of its windows."""
    for sequence in work.decode:
        if sequence.revision is not None:
            sequence.revision.book()


def _pairs(decode: Sequence[DecodeRow], chunks: Sequence[PrefillChunk]) -> int:
    own = sum(row.position + 1 for row in decode)
    return own + sum(map(count_read, chunks))


def pool_dtype(model: Decoder, cache: CacheConfig) -> torch.dtype:
    """The dtype that keys and values of ``model`` are stored in."""
    return FP8 if cache.kv_dtype == "fp8" else model.dtype


def _measured_costs(model: Decoder, config: EngineConfig, on_launch: OnLaunch) -> CostModel:
    """What attention costs on the model's device; built-in costs, and a warning, where that can't
    be measured.
    """
    shape, dtype = model.config, pool_dtype(model, config.cache)
    heads = shape.num_qo_heads, shape.num_kv_heads, shape.head_dim
    wanted = Shape(*heads, config.cache.page_size, model.dtype, dtype)
    return costs_of(model.device, wanted, make_probe=DeviceProbe, on_launch=on_launch).model


def _score_rules(shape: ModelConfig) -> tuple[ScoreRule, ...]:
    return tuple(
        ScoreRule(
            softmax_scale(shape, layer),
            soft_cap=shape.soft_cap,
            window=shape.window(layer),
        )
        for layer in range(shape.num_layers)
    )


def _pool_pages(
    cache: CacheConfig, scheduler: SchedulerConfig, model: Decoder, max_model_len: int
) -> int:
    if cache.num_pages is not None:
        return cache.num_pages
    shape = model.config
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    per_page = per_token * pool_dtype(model, cache).itemsize * cache.page_size
    if cache.memory_gib is not None:
        pages = int(cache.memory_gib * _GIB) // per_page
        if pages == 0:
            raise InvalidOption(
                f"memory_gib={cache.memory_gib} does not hold a page of {per_page} bytes: raise it",
                "memory_gib",
            )
        return pages
    # never more than all sequences at full length could use, twice over for idle documents
    most = 2 * scheduler.max_num_seqs * -(-max_model_len // cache.page_size)
    return max(1, min(most, _spare_bytes(model.device) // per_page))


def _spare_bytes(device: torch.device) -> int:
    """What a pool may take when nobody said: most of a GPU's free memory, a quarter of the
    machine's, or of what a container may have.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * 0.85)
    return int(available_memory() * 0.25)

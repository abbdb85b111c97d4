"""``bench attention``: one layer's attention against its roofline and against other libraries.

Every case is planned as in the engine. Some of its rows are compared with fp64 attention before any
timing. The floor uses the copy and product rates that the same run measured. Arms alternate. A
layer's time comes from a captured graph of several layers, after a pause, on devices with
graphs (`looseleaf_lab.bench.replays`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from looseleaf.attention.plan.calibration import Shape, costs_of
from looseleaf.attention.plan.cost_model import CostModel, cost_model_of
from looseleaf.attention.plan.gathered import reads_gathered
from looseleaf.attention.plan.planner import AttentionPlan, Planner
from looseleaf.attention.plan.probe import DeviceProbe
from looseleaf.config import ModelConfig, RopeConfig
from looseleaf.ops.finish_rows import finish_rows
from looseleaf.ops.hopper.attention import serves
from looseleaf.ops.merge_states import merge_states
from looseleaf.ops.page_dtypes import FP8, to_pages
from looseleaf.ops.partial_attention import partial_attention
from looseleaf.ops.prefill_attention import gathered_pages, prefill_attention
from looseleaf.rope import build_rotation
from looseleaf.types import Rotation, ScoreRule
from looseleaf_lab.bench.attention_cases import (
    AttentionShape,
    Case,
    after_documents,
    as_one_span,
    causal,
    document_subsets,
    private,
    ragged,
    shared,
)
from looseleaf_lab.bench.attention_check import Truth, check
from looseleaf_lab.bench.attention_peers import PeerUnavailable, peers_of
from looseleaf_lab.bench.ceilings import Ceilings, measure_ceilings
from looseleaf_lab.bench.latent_arms import EXPANDED, MAPPED, latent_arms, latent_flops
from looseleaf_lab.bench.progress import SILENT, Progress
from looseleaf_lab.bench.replays import seconds_of
from looseleaf_lab.bench.timing import Samples, measure_in_turn

Row = dict[str, str | int | float]
Arm = Callable[[], object]
_NARROW = "e4m3 pages"
# more than the difference of two correct 16-bit kernels
_PEER_TOLERANCE = 0.03


@dataclass(frozen=True)
class AttentionConfig:
    """Shape, lengths and repetitions. ``longest`` scales all cases; with ``only``, the cases
    whose names contain one of its texts are measured."""

    shape: AttentionShape = field(default_factory=AttentionShape)
    longest: int = 16384
    rows: int = 64
    repetitions: int = 9
    device: str = "cuda"
    peers: bool = True
    only: tuple[str, ...] = ()


def cases(config: AttentionConfig) -> list[Case]:
    """The sweep: private, shared, mixed, prompts."""
    shape, long, rows = config.shape, config.longest, config.rows
    all_cases = [
        private(shape, rows, long // 2),
        private(shape, 1, long // 2),
        private(shape, 4 * rows, long // 32),
        private(shape, max(1, rows * 3 // 8), long),
        shared(shape, rows, long),
        shared(shape, rows, long, spread=16),
        shared(shape, rows, long, tail=long // 64, spread=16),
        shared(shape, 2, long // 64),
        ragged(shape, rows // 2, long // 8),
        document_subsets(shape, rows * 3 // 8, 3, 6, long // 4, tail=long // 64),
        document_subsets(shape, rows, 6, 12, long // 32, tail=long // 64),
        causal(shape, long),
        causal(shape, long // 4),
        after_documents(shape, long // 8, 4, long // 32),
        after_documents(shape, long // 8, 4, long // 16),
        after_documents(shape, long // 16, 5, long // 8),
        after_documents(shape, long // 16, 5, long // 4),
        after_documents(shape, rows, 5, long // 4),
        after_documents(shape, rows, 5, long // 8),
        after_documents(shape, rows, 4, long // 16),
        after_documents(shape, rows, 6, long // 32),
        after_documents(shape, 2 * rows, 1, long // 4),
        after_documents(shape, 4 * rows, 4, long // 16),
        after_documents(shape, 8 * rows, 5, long // 8),
    ]
    only = config.only or ("",)
    return [case for case in all_cases if any(part in case.name for part in only)]


class Bench:
    """Pools, queries and plans on one device."""

    def __init__(self, config: AttentionConfig, num_pages: int, longest: int) -> None:
        self.config, self.shape = config, config.shape
        self.device = torch.device(config.device)
        shape = config.shape
        size = (shape.planes, num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim)
        # a fixed seed, so that the budget check is deterministic
        self._generator = torch.Generator(self.device).manual_seed(0)
        self.pools = [
            torch.empty(size, dtype=shape.dtype, device=self.device).normal_(
                generator=self._generator
            )
            for _ in range(shape.layers)
        ]
        latent = shape.latent_rope > 0
        rope = RopeConfig(shape.head_dim, shape.latent_rope or shape.head_dim)
        self.rotation = build_rotation(rope, longest, self.device)
        self.rule = ScoreRule(shape.head_dim**-0.5)
        costs = cost_model_of(self.device, shape.head_dim, shape.dtype.itemsize, latent=latent)
        self.planner = Planner(
            shape.page_size,
            shape.num_qo_heads,
            shape.num_kv_heads,
            self.device,
            costs,
            finishing=not latent,
            gathering=not latent and reads_gathered(self.pools[0][None], shape.dtype, [self.rule]),
        )
        # whether long prompts use the span kernel (`PassGraphs.sooner`)
        self.passes = serves(self.pools[0][0], self.rule)
        # rotations of width 0: the same kernels without frames
        self.flat = Rotation(self.rotation.cos[:, :0], self.rotation.sin[:, :0])

    @cached_property
    def narrow_pools(self) -> list[Tensor]:
        """The pools as e4m3 pages."""
        return [to_pages(pool, FP8) for pool in self.pools]

    @cached_property
    def measured_costs(self) -> CostModel | None:
        """Costs measured on the device, or None if it uses the built-in ones."""
        heads = self.shape.num_qo_heads, self.shape.num_kv_heads, self.shape.head_dim
        rope = self.shape.latent_rope
        dtypes = self.shape.dtype, self.shape.dtype
        shape = Shape(*heads, self.shape.page_size, *dtypes, rope > 0, rope or None)
        costs = costs_of(self.device, shape, make_probe=DeviceProbe)
        return None if costs.source == "built-in" else costs.model

    @property
    def truth(self) -> Truth:
        """The input of the true answers of the first layer."""
        return Truth(self.pools[0], self.rotation, self.rule, self.shape.latent_rope)

    def query(self, case: Case) -> Tensor:
        """Random unrotated query rows."""
        size = (case.num_rows, self.shape.num_qo_heads, self.shape.head_dim)
        values = torch.randn(size, device=self.device, generator=self._generator)
        return values.to(self.shape.dtype)

    def plan(
        self,
        case: Case,
        *,
        grouping: bool = True,
        invariant: bool = False,
        costs: CostModel | None = None,
        gathering: bool = True,
        by_spans: bool = False,
    ) -> AttentionPlan:
        """The engine's plan of the case, or one that reads its new rows ``by_spans``."""
        costs = costs or self.planner.costs
        finishing = not invariant and self.planner.finishing
        gathering = gathering and self.planner.gathering
        planner = replace(
            self.planner,
            batch_invariant=invariant,
            costs=costs,
            finishing=finishing,
            gathering=gathering,
        )
        in_pass = self.passes and not case.rows and planner.by_work_list(case.chunks)
        if in_pass or by_spans:
            return AttentionPlan(0, None, planner.span_list(case.chunks))
        groups = planner.group(case.rows, grouping=grouping)
        return planner.plan(case.rows, groups, case.chunks, finish=True)

    def layer(
        self,
        q: Tensor,
        plan: AttentionPlan,
        layer: int,
        rotation: Rotation,
        pools: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Attention of one layer; ``pools`` replaces the pools of the shape's dtype."""
        pool = (pools or self.pools)[layer]
        k_pages, v_pages = pool[0], pool[-1]
        out = torch.empty_like(q)
        if plan.work is not None:
            rows = slice(0, plan.num_work_rows)
            states = partial_attention(q[rows], k_pages, v_pages, plan.work, rotation, self.rule)
            if plan.work.whole and plan.spans is None:
                return states.out
            if plan.work.finishing:
                pages = k_pages, v_pages
                finish_rows(states, q[rows], pages, plan.work, rotation, self.rule, out[rows])
            else:
                merge_states(states, plan.work.row_state_indptr, out=out[rows], indptr_ready=True)
        if plan.spans is not None:
            rows = slice(plan.num_work_rows, None)
            spans = plan.spans
            state = prefill_attention(q[rows], k_pages, v_pages, spans, rotation, self.rule)
            if not plan.num_work_rows:
                return state.out
            out[rows] = state.out
        return out

    def arm(self, q: Tensor, plan: AttentionPlan, rotation: Rotation | None = None) -> Arm:
        """All layers in sequence."""
        table = self.rotation if rotation is None else rotation
        layers = range(self.shape.layers)
        return lambda: [self.layer(q, plan, layer, table) for layer in layers]


def gathered_once(bench: Bench, q: Tensor, plan: AttentionPlan) -> Arm:
    """An arm of a gathering plan whose keys need no rotation, as if encoded at their positions:
    rows rotate once, and gathering only copies keys."""
    gathered = plan.spans
    assert gathered is not None
    one_span = replace(gathered, source_slots=None, source_turns=None)

    def layer(pages: Tensor) -> Tensor:
        k, v = gathered_pages(q, pages[0], pages[1], gathered, bench.flat)
        return prefill_attention(q, k, v, one_span, bench.rotation, bench.rule).out

    return lambda: [layer(pool) for pool in bench.pools]


def require_right(model: ModelConfig, device: torch.device) -> None:
    """Check attention in the heads of ``model`` before any timing that depends on it.

    The cases are rows that share, a ragged mixture, and a prompt after documents, long enough
    for the prompt kernel. Raises BenchmarkRefused if attention is wrong."""
    shape = AttentionShape.of(model, layers=1)
    num_rows, longest = (4, 256) if device.type == "cpu" else (64, 2048)
    sweep = [
        shared(shape, num_rows, longest, tail=longest // 8, spread=16),
        ragged(shape, num_rows, longest // 8),
        after_documents(shape, 1024, 4, longest // 8),
    ]
    pages, max_position = max(c.num_pages for c in sweep), max(c.longest for c in sweep)
    bench = Bench(AttentionConfig(shape, device=str(device)), pages, max_position)
    for case in sweep:
        q = bench.query(case)
        out = bench.layer(q, bench.plan(case), 0, bench.rotation)
        check(case, q, out, bench.truth)


def measure(
    config: AttentionConfig,
    on_missing: Callable[[str], None] = lambda text: None,
    progress: Progress = SILENT,
) -> Iterator[Row]:
    """Rows of the table as they are measured; ``on_missing`` gets a message per skipped peer.

    Raises BenchmarkRefused if an answer is wrong.
    """
    sweep = cases(config)
    device = torch.device(config.device)
    progress.stage("ceilings of the device: copies and products")
    ceilings = measure_ceilings(device, config.shape.dtype)
    pages, max_position = max(c.num_pages for c in sweep), max(c.longest for c in sweep)
    progress.stage(f"random keys of {pages:,} pages in {config.shape.layers} layers")
    bench = Bench(config, pages, max_position)
    # a constant share of every case, for plans and the check
    base_work = 0.02 * max(_work(config.shape, case) for case in sweep)
    for case in progress.over(
        sweep, lambda case: case.name, lambda case: base_work + _work(config.shape, case)
    ):
        yield from _measure_case(bench, case, ceilings, on_missing, progress)


def _work(shape: AttentionShape, case: Case) -> float:
    return case.pairs() * shape.flops_per_pair


def _own_arms(bench: Bench, case: Case, q: Tensor) -> dict[str, Arm]:
    """The engine's plan, and variants that show the cost of its parts."""
    shape = bench.shape
    plan = bench.plan(case)
    arms = {"looseleaf": bench.arm(q, plan)}
    # the kernels find a latent key's values after its rotated dims
    if not shape.latent_rope:
        arms["without frames"] = bench.arm(q, plan, bench.flat)
    if shape.latent_rope and not case.rows:
        arms |= latent_arms(
            shape,
            case,
            bench.pools,
            lambda layer, q, k, v: bench.layer(q, plan, layer, bench.rotation),
            bench.rotation,
            bench.rule,
        )
    if not shape.latent_rope and len(case.chunks) == 1 and len(case.chunks[0].spans) > 1:
        in_place = bench.plan(case, gathering=False)
        if plan.spans is not None and plan.spans.source_slots is not None:
            arms["without frames, rows turned once"] = gathered_once(bench, q, plan)
        arms["keys in place"] = bench.arm(q, in_place)
        arms["keys in place, without frames"] = bench.arm(q, in_place, bench.flat)
        one_span = bench.plan(as_one_span(case), gathering=False, by_spans=plan.work is None)
        arms["as one span"] = bench.arm(q, one_span)
    if case.rows:
        layers = range(bench.shape.layers)
        # the engine plans narrower pages with other costs
        latent = bench.shape.latent_rope > 0
        costs = cost_model_of(bench.device, shape.head_dim, FP8.itemsize, latent=latent)
        narrow = bench.plan(case, costs=costs)
        arms[_NARROW] = lambda: [
            bench.layer(q, narrow, layer, bench.rotation, bench.narrow_pools) for layer in layers
        ]
        arms["ungrouped"] = bench.arm(q, bench.plan(case, grouping=False))
        arms["batch-invariant"] = bench.arm(q, bench.plan(case, invariant=True))
        if bench.measured_costs is not None:
            arms["measured costs"] = bench.arm(q, bench.plan(case, costs=bench.measured_costs))
    return arms


def _peer_arms(
    bench: Bench, case: Case, q: Tensor, on_missing: Callable[[str], None]
) -> dict[str, Callable[[], float]]:
    """Timers of the peers that support the case; paged peers must reproduce our answer."""
    if bench.shape.latent_rope:
        return {}
    flat = bench.layer(q, bench.plan(case), 0, bench.flat).double()
    timers = {}
    for peer in peers_of(case, bench.shape, q, on_missing):
        # a dense peer has one rectangle, a paged one our pool per layer
        pools = bench.pools[:1] if peer.dense else bench.pools
        layers = [(pool[0], pool[1]) for pool in pools]
        try:
            if not peer.dense:
                difference = (peer.attend(layers[0]).double() - flat).norm() / flat.norm()
                if not difference < _PEER_TOLERANCE:
                    raise PeerUnavailable(f"its answer differs by {float(difference):.2g}")
            arm = partial(_every_layer, peer.attend, layers)
            timers[peer.name] = seconds_of(arm, bench.device)
        except Exception as error:
            on_missing(f"{case.name}, {peer.name}: skipped, {type(error).__name__}: {error}")
    return timers


def _every_layer(
    attend: Callable[[tuple[Tensor, Tensor]], Tensor], layers: Sequence[tuple[Tensor, Tensor]]
) -> list[Tensor]:
    return [attend(layer) for layer in layers]


def _measure_case(
    bench: Bench,
    case: Case,
    ceilings: Ceilings,
    on_missing: Callable[[str], None],
    progress: Progress,
) -> Iterator[Row]:
    q = bench.query(case)
    plan = bench.plan(case)
    truth = bench.truth
    progress.stage(f"{case.name}: {case.num_rows} rows, some of them against fp64")
    error = check(case, q, bench.layer(q, plan, 0, bench.rotation), truth)
    shape, arms = bench.shape, _own_arms(bench, case, q)
    timed = {name: seconds_of(arm, bench.device) for name, arm in arms.items()}
    if bench.config.peers:
        timed |= _peer_arms(bench, case, q, on_missing)
    samples = measure_in_turn(timed, bench.config.repetitions, progress=progress)
    num_bytes = case.distinct_keys(shape.page_size) * shape.bytes_per_key
    flops = case.pairs() * shape.flops_per_pair
    floor = ceilings.floor(num_bytes, flops)
    narrow_floor = ceilings.floor(num_bytes / shape.dtype.itemsize, flops)
    for name, seconds in samples.items():
        layers = 1 if name.startswith("torch") else shape.layers
        layer_times = Samples(tuple(value / layers * 1e6 for value in seconds.values))
        arm_floor, arm_flops = narrow_floor if name == _NARROW else floor, flops
        if name in (MAPPED, EXPANDED):
            arm_flops = latent_flops(shape, case, name)
            arm_floor = ceilings.floor(num_bytes, arm_flops)
        yield _row(case, name, layer_times, arm_floor * 1e6) | {
            "flops": float(arm_flops),
            "bytes": float(num_bytes) / (shape.dtype.itemsize if name == _NARROW else 1),
            "copy_tb_per_s": ceilings.bytes_per_second / 1e12,
            "matrix_tflop_per_s": ceilings.flops_per_second / 1e12,
            "error_share_of_budget": error,
        }


def _row(case: Case, arm: str, samples: Samples, floor: float) -> Row:
    return {
        "measurement": case.name,
        "arm": arm,
        "unit": "us a layer",
        "median": samples.median,
        "low": samples.range[0],
        "high": samples.range[1],
        "floor": floor,
        "share_of_roofline": floor / samples.median,
    }


def ratios(rows: Sequence[Mapping[str, str | int | float]]) -> Iterator[str]:
    """Sentences with the ratios of each case's arms to ours."""
    by_case: dict[str, dict[str, float]] = {}
    for row in rows:
        by_case.setdefault(str(row["measurement"]), {})[str(row["arm"])] = float(row["median"])
    for name, arms in by_case.items():
        ours = arms["looseleaf"]
        ratios_of_arms = (f"{arm} {arms[arm] / ours:.3f}" for arm in arms if arm != "looseleaf")
        yield f"{name}: times of ours: {', '.join(ratios_of_arms)}"

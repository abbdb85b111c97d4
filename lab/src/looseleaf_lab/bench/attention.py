"""``bench attention``: the attention of one layer beside its roofline and PyTorch's own.

Every case is planned as the engine plans it, its answers are compared with attention in fp64 on
some rows before anything is timed, and the floor is what the same run measured the device to move
and to multiply at best. Arms take turns; a layer's time comes from a captured graph of several
layers where the device has graphs, behind a rest (`looseleaf_lab.bench.replays`).
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
    as_one_span,
    behind_documents,
    causal,
    private,
    ragged,
    several,
    shared,
)
from looseleaf_lab.bench.attention_check import Truth, check
from looseleaf_lab.bench.attention_peers import PeerUnavailable, peers_of
from looseleaf_lab.bench.ceilings import Ceilings, measure_ceilings
from looseleaf_lab.bench.progress import SILENT, Progress
from looseleaf_lab.bench.replays import seconds_of
from looseleaf_lab.bench.timing import Repeated, measure_in_turn

Row = dict[str, str | int | float]
Arm = Callable[[], object]
_NARROW = "e4m3 pages"
# what two right kernels of 16 bits differ by, and some more
_SAME_ANSWER = 0.03


@dataclass(frozen=True)
class AttentionConfig:
    """Which shape, how long, and how often; ``longest`` scales all cases, of which those are
    measured that have one of ``only`` in their name, all without any."""

    shape: AttentionShape = field(default_factory=AttentionShape)
    longest: int = 16384
    rows: int = 64
    repetitions: int = 9
    device: str = "cuda"
    peers: bool = True
    only: tuple[str, ...] = ()


def cases(config: AttentionConfig) -> list[Case]:
    """The sweep: nothing shared, everything shared, mixtures, prompts."""
    shape, long, rows = config.shape, config.longest, config.rows
    every = [
        private(shape, rows, long // 2),
        private(shape, 1, long // 2),
        private(shape, 4 * rows, long // 32),
        private(shape, max(1, rows * 3 // 8), long),
        shared(shape, rows, long),
        shared(shape, rows, long, spread=16),
        shared(shape, rows, long, tail=long // 64, spread=16),
        shared(shape, 2, long // 64),
        ragged(shape, rows // 2, long // 8),
        several(shape, rows * 3 // 8, 3, 6, long // 4, tail=long // 64),
        several(shape, rows, 6, 12, long // 32, tail=long // 64),
        causal(shape, long),
        causal(shape, long // 4),
        behind_documents(shape, long // 8, 4, long // 32),
        behind_documents(shape, long // 8, 4, long // 16),
        behind_documents(shape, long // 16, 5, long // 8),
        behind_documents(shape, long // 16, 5, long // 4),
        behind_documents(shape, rows, 5, long // 4),
        behind_documents(shape, rows, 5, long // 8),
        behind_documents(shape, rows, 4, long // 16),
        behind_documents(shape, rows, 6, long // 32),
        behind_documents(shape, 2 * rows, 1, long // 4),
        behind_documents(shape, 4 * rows, 4, long // 16),
        behind_documents(shape, 8 * rows, 5, long // 8),
    ]
    only = config.only or ("",)
    return [case for case in every if any(part in case.name for part in only)]


class Bench:
    """Pools, queries and plans on one device."""

    def __init__(self, config: AttentionConfig, num_pages: int, longest: int) -> None:
        self.config, self.shape = config, config.shape
        self.device = torch.device(config.device)
        shape = config.shape
        size = (2, num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim)
        # always the same numbers: whether an answer is within its budget must not be drawn by lot
        self._drawn = torch.Generator(self.device).manual_seed(0)
        self.pools = [
            torch.empty(size, dtype=shape.dtype, device=self.device).normal_(generator=self._drawn)
            for _ in range(shape.layers)
        ]
        rope = RopeConfig(shape.head_dim, shape.head_dim)
        self.rotation = build_rotation(rope, longest, self.device)
        self.rule = ScoreRule(shape.head_dim**-0.5)
        costs = cost_model_of(self.device, shape.head_dim, shape.dtype.itemsize)
        self.planner = Planner(
            shape.page_size,
            shape.num_qo_heads,
            shape.num_kv_heads,
            self.device,
            costs,
            finishing=True,
            gathering=reads_gathered(self.pools[0][None], shape.dtype, [self.rule]),
        )
        # whether the engine has passes (`PassGraphs.sooner` says which chunks go that way)
        self.passes = serves(self.pools[0][0], self.rule)
        # the same kernels without frames: as if queries came rotated
        self.flat = Rotation(self.rotation.cos[:, :0], self.rotation.sin[:, :0])

    @cached_property
    def narrow_pools(self) -> list[Tensor]:
        """The pools as pages of e4m3 hold them."""
        return [to_pages(pool, FP8) for pool in self.pools]

    @cached_property
    def measured(self) -> CostModel | None:
        """Costs measured on the device, None where they are the built-in ones."""
        heads = self.shape.num_qo_heads, self.shape.num_kv_heads, self.shape.head_dim
        shape = Shape(*heads, self.shape.page_size, self.shape.dtype, self.shape.dtype)
        found = costs_of(self.device, shape, make_probe=DeviceProbe)
        return None if found.source == "built-in" else found.model

    def query(self, case: Case) -> Tensor:
        """Random unrotated query rows."""
        size = (case.num_rows, self.shape.num_qo_heads, self.shape.head_dim)
        drawn = torch.randn(size, device=self.device, generator=self._drawn)
        return drawn.to(self.shape.dtype)

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
        """The step as the engine would plan it, or with its new rows read ``by_spans``."""
        costs = costs or self.planner.costs
        finishing, gathering = not invariant, gathering and self.planner.gathering
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
        """Attention of one layer, over pages of the shape's dtype if ``pools`` are no others."""
        k_pages, v_pages = (pools or self.pools)[layer]
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
        """All layers, one after another."""
        turned = self.rotation if rotation is None else rotation
        layers = range(self.shape.layers)
        return lambda: [self.layer(q, plan, layer, turned) for layer in layers]


def turned_once(bench: Bench, q: Tensor, plan: AttentionPlan) -> Arm:
    """What is left of a plan whose keys are gathered if they need no turning, as keys that were
    encoded in their place: rows turn once, as those of any engine do, and keys are only copied."""
    gathered = plan.spans
    assert gathered is not None
    one_span = replace(gathered, source_slots=None, source_turns=None)

    def layer(pages: Tensor) -> Tensor:
        k, v = gathered_pages(q, pages[0], pages[1], gathered, bench.flat)
        return prefill_attention(q, k, v, one_span, bench.rotation, bench.rule).out

    return lambda: [layer(pool) for pool in bench.pools]


def require_right(model: ModelConfig, device: torch.device) -> None:
    """See that attention is right in the heads of ``model`` before anything that rests on it is
    timed: rows that share, a ragged mixture, a prompt behind documents that is long enough for the
    kernel of prompts.

    Raises BenchmarkRefused if it is not."""
    shape = AttentionShape(
        model.num_qo_heads, model.num_kv_heads, model.head_dim, layers=1,
        dtype=getattr(torch, model.torch_dtype),
    )  # fmt: skip
    few, long = (4, 256) if device.type == "cpu" else (64, 2048)
    sweep = [
        shared(shape, few, long, tail=long // 8, spread=16),
        ragged(shape, few, long // 8),
        behind_documents(shape, 1024, 4, long // 8),
    ]
    pages, longest = max(c.num_pages for c in sweep), max(c.longest for c in sweep)
    bench = Bench(AttentionConfig(shape, device=str(device)), pages, longest)
    for case in sweep:
        q = bench.query(case)
        out = bench.layer(q, bench.plan(case), 0, bench.rotation)
        check(case, q, out, Truth(bench.pools[0], bench.rotation, bench.rule))


def measure(
    config: AttentionConfig,
    on_missing: Callable[[str], None] = lambda text: None,
    progress: Progress = SILENT,
) -> Iterator[Row]:
    """Rows of the table as they are measured; ``on_missing`` hears which peers are skipped, and
    why.

    Raises BenchmarkRefused if an answer is wrong.
    """
    sweep = cases(config)
    device = torch.device(config.device)
    progress.stage("what the device can do at best: copies and products")
    ceilings = measure_ceilings(device, config.shape.dtype)
    pages, longest = max(c.num_pages for c in sweep), max(c.longest for c in sweep)
    progress.stage(f"random keys of {pages:,} pages in {config.shape.layers} layers")
    bench = Bench(config, pages, longest)
    # a few seconds whatever the case, for plans and the check
    least = 0.02 * max(_work(config.shape, case) for case in sweep)
    for case in progress.over(
        sweep, lambda case: case.name, lambda case: least + _work(config.shape, case)
    ):
        yield from _measure_case(bench, case, ceilings, (on_missing, progress))


def _work(shape: AttentionShape, case: Case) -> float:
    return case.pairs() * shape.flops_per_pair


def _own_arms(bench: Bench, case: Case, q: Tensor) -> dict[str, Arm]:
    """Ours, and what its parts cost or save."""
    plan = bench.plan(case)
    arms = {
        "looseleaf": bench.arm(q, plan),
        "without frames": bench.arm(q, plan, bench.flat),
    }
    if len(case.chunks) == 1 and len(case.chunks[0].spans) > 1:
        in_place = bench.plan(case, gathering=False)
        if plan.spans is not None and plan.spans.source_slots is not None:
            arms["without frames, rows turned once"] = turned_once(bench, q, plan)
        arms["keys in place"] = bench.arm(q, in_place)
        arms["keys in place, without frames"] = bench.arm(q, in_place, bench.flat)
        one_span = bench.plan(as_one_span(case), gathering=False, by_spans=plan.work is None)
        arms["as one span"] = bench.arm(q, one_span)
    if case.rows:
        layers = range(bench.shape.layers)
        # tiles of other pages, as the engine plans them
        costs = cost_model_of(bench.device, bench.shape.head_dim, FP8.itemsize)
        narrow = bench.plan(case, costs=costs)
        arms[_NARROW] = lambda: [
            bench.layer(q, narrow, layer, bench.rotation, bench.narrow_pools) for layer in layers
        ]
        arms["ungrouped"] = bench.arm(q, bench.plan(case, grouping=False))
        arms["batch-invariant"] = bench.arm(q, bench.plan(case, invariant=True))
        if bench.measured is not None:
            arms["measured costs"] = bench.arm(q, bench.plan(case, costs=bench.measured))
    return arms


def _peer_arms(
    bench: Bench, case: Case, q: Tensor, on_missing: Callable[[str], None]
) -> dict[str, Callable[[], float]]:
    """Timers of the peers that can do the case, and give our answer where they read our pages."""
    flat = bench.layer(q, bench.plan(case), 0, bench.flat).double()
    timers = {}
    for peer in peers_of(case, bench.shape, q, on_missing):
        # a peer has one rectangle, ours a pool for every layer
        pools = bench.pools[:1] if peer.dense else bench.pools
        layers = [(pool[0], pool[1]) for pool in pools]
        try:
            if not peer.dense:
                away = (peer.attend(layers[0]).double() - flat).norm() / flat.norm()
                if not away < _SAME_ANSWER:
                    raise PeerUnavailable(f"its answer is another: {float(away):.2g} away")
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
    told: tuple[Callable[[str], None], Progress],
) -> Iterator[Row]:
    on_missing, progress = told
    q = bench.query(case)
    plan = bench.plan(case)
    truth = Truth(bench.pools[0], bench.rotation, bench.rule)
    progress.stage(f"{case.name}: {case.num_rows} rows, some of them against fp64")
    error = check(case, q, bench.layer(q, plan, 0, bench.rotation), truth)
    shape, arms = bench.shape, _own_arms(bench, case, q)
    timed = {name: seconds_of(arm, bench.device) for name, arm in arms.items()}
    if bench.config.peers:
        timed |= _peer_arms(bench, case, q, on_missing)
    taken = measure_in_turn(timed, bench.config.repetitions, progress=progress)
    num_bytes = case.distinct_keys(shape.page_size) * shape.bytes_per_key
    flops = case.pairs() * shape.flops_per_pair
    floor = ceilings.floor(num_bytes, flops)
    narrow_floor = ceilings.floor(num_bytes / shape.dtype.itemsize, flops)
    for name, seconds in taken.items():
        layers = 1 if name.startswith("torch") else shape.layers
        a_layer = Repeated(tuple(value / layers * 1e6 for value in seconds.values))
        here = narrow_floor if name == _NARROW else floor
        yield _row(case, name, a_layer, here * 1e6) | {
            "flops": float(flops),
            "bytes": float(num_bytes) / (shape.dtype.itemsize if name == _NARROW else 1),
            "copy_tb_per_s": ceilings.bytes_per_second / 1e12,
            "matrix_tflop_per_s": ceilings.flops_per_second / 1e12,
            "error_share_of_budget": error,
        }


def _row(case: Case, arm: str, taken: Repeated, floor: float) -> Row:
    return {
        "measurement": case.name,
        "arm": arm,
        "unit": "us a layer",
        "median": taken.median,
        "low": taken.range[0],
        "high": taken.range[1],
        "floor": floor,
        "share_of_roofline": floor / taken.median,
    }


def ratios(rows: Sequence[Mapping[str, str | int | float]]) -> Iterator[str]:
    """Sentences that compare arms of the same case."""
    by_case: dict[str, dict[str, float]] = {}
    for row in rows:
        by_case.setdefault(str(row["measurement"]), {})[str(row["arm"])] = float(row["median"])
    for name, arms in by_case.items():
        ours = arms["looseleaf"]
        others = (f"{arm} {arms[arm] / ours:.3f}" for arm in arms if arm != "looseleaf")
        yield f"{name}: times of ours: {', '.join(others)}"

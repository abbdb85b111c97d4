"""``bench select``: decode steps with dense attention, with selection, and with revision.

There are three figures per context and batch. They are one layer's attention over random keys, a
whole token of an engine with random weights, and the summaries of pages. On a GPU, steps replay
CUDA graphs. Bytes are counted, not measured: keys and values of the pages read, the summaries used
to select them, and states that rows keep."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch

from looseleaf.attention.paged import PagedAttention, StepRows
from looseleaf.attention.plan.groups import DecodeRow, ReadSpan
from looseleaf.attention.select.policy import SelectingRow
from looseleaf.config import ModelConfig, Select
from looseleaf.errors import InvalidOption
from looseleaf.kv.pool import PagePool
from looseleaf.kv.summaries import PageSummaries
from looseleaf.rope.frames import build_rotation
from looseleaf.sparse import make_policy
from looseleaf.types import ScoreRule
from looseleaf_lab.bench.model_shapes import model_shape
from looseleaf_lab.bench.progress import SILENT, Progress
from looseleaf_lab.bench.results import Row
from looseleaf_lab.bench.select_tokens import TokenArms, served_name, settle
from looseleaf_lab.bench.timing import Samples, measure_in_turn

_LAYERS = 4
_PAGE_SIZE = 16
# graph replays per timing on a GPU
_REPLAYS = 25


@dataclass(frozen=True)
class SelectBench:
    """One shape, policy and budget over contexts, batches and windows of revised rows; the widest
    window also runs adaptively, shrinking with the batch. Each number of ``served`` is an arm with
    one choice of pages for as many layers."""

    shape: str
    policy: Select
    contexts: Sequence[int]
    batches: Sequence[int]
    windows: Sequence[int]
    new_tokens: int
    repetitions: int
    device: torch.device
    served: Sequence[int] = ()

    def __post_init__(self) -> None:
        model_shape(self.shape)
        if any(number < 2 for number in self.served):
            raise InvalidOption("a choice that is shared serves 2 layers or more")
        summary = None
        if (policy := make_policy(self.policy, _PAGE_SIZE)) is not None:
            summary = policy.summary
        if summary is None:
            raise InvalidOption(
                f"policy {self.policy.policy!r} keeps no summaries of pages: use quest or "
                "representatives"
            )


def measure(bench: SelectBench, progress: Progress = SILENT) -> Iterator[Row]:
    """A row per arm, context and batch."""
    sizes = product(bench.contexts, bench.batches)
    for context, batch in progress.over(
        sizes, lambda size: f"{size[0]} tokens, batch {size[1]}", lambda size: size[0] * size[1]
    ):
        yield from _attention_rows(bench, context, batch, progress)
        yield from _token_rows(bench, context, batch, progress)


def _attention_rows(bench: SelectBench, context: int, batch: int, progress: Progress) -> list[Row]:
    """Attention of one layer, and the cost of summaries."""
    layer = _Layer(model_shape(bench.shape), context, batch, bench.device)
    every = replace(bench.policy, dense_layers=())
    policy = make_policy(every, _PAGE_SIZE)
    assert policy is not None and policy.summary is not None, "SelectBench checks it"
    selections = {"select": every} | {
        served_name(number): replace(every, anchors=tuple(range(0, _LAYERS, number)))
        for number in bench.served
    }
    rows_of = {name: layer.selecting(select) for name, select in selections.items()}
    arms = {"dense": layer.arm(layer.rows)}
    arms |= {name: layer.arm(rows) for name, rows in rows_of.items()}
    samples = measure_in_turn(arms, bench.repetitions, progress=progress)
    megabytes = {"dense": layer.pool.bytes_per_page * layer.pool.num_pages / _LAYERS}
    megabytes |= {name: layer.bytes_read(rows) for name, rows in rows_of.items()}
    rows = _rows(bench, "attention", (context, batch), samples, megabytes)
    summaries = PageSummaries(layer.pool, policy.summary)

    def seal(pages: int) -> Callable[[], float]:
        def run() -> float:
            layer.pool.generations[:pages] += 1
            counts = np.full(pages, _PAGE_SIZE)
            settle(bench.device)
            start = time.perf_counter()
            summaries.write(range(pages), counts)
            settle(bench.device)
            return (time.perf_counter() - start) / _LAYERS

        return run

    num_pages = layer.pool.num_pages
    sealing = {"one page": seal(1), "all pages": seal(num_pages)}
    samples = measure_in_turn(sealing, bench.repetitions, progress=progress)
    per_page = layer.pool.bytes_per_page / (2 * _LAYERS)
    return rows + _rows(
        bench, "sealing", (context, batch), samples,
        {"one page": per_page, "all pages": per_page * num_pages},
    )  # fmt: skip


def _token_rows(bench: SelectBench, context: int, batch: int, progress: Progress) -> list[Row]:
    arms = TokenArms(bench.shape, bench.policy, context, batch, bench.new_tokens, bench.device)
    timers: dict[str, Callable[[], float]] = {
        "dense": arms.dense,
        "left alone": arms.engine_default,
    }
    for number in bench.served:
        timers[served_name(number)] = arms.served_arm(number)
    for window in (1, *(window for window in bench.windows if window > 1)):
        timers[arms.arm_name(window)] = arms.revision_arm(window)
    widest = max(bench.windows)
    if widest > 1:
        timers[arms.arm_name(widest, adaptive=True)] = arms.revision_arm(widest, adaptive=True)
    samples = measure_in_turn(timers, bench.repetitions, progress=progress)
    return _rows(bench, "token", (context, batch), samples, arms.bytes_read)


def _rows(
    bench: SelectBench,
    measurement: str,
    size: tuple[int, int],
    samples: Mapping[str, Samples],
    bytes_read: Mapping[str, float],
) -> list[Row]:
    """A row per arm; ``speedup`` is over the first arm."""
    first = next(iter(samples.values())).median
    return [
        {
            "what": measurement,
            "shape": bench.shape,
            "select": str(bench.policy),
            "context": size[0],
            "batch": size[1],
            "arm": name,
            "ms": seconds.median * 1e3,
            "least": seconds.range[0] * 1e3,
            "most": seconds.range[1] * 1e3,
            "speedup": first / seconds.median,
            "mb": bytes_read[name] / 1e6,
            "repetitions": bench.repetitions,
        }
        for name, seconds in samples.items()
    ]


@dataclass(eq=False)
class _Layer:
    """A few layers of random keys, and a decode row at the end of each context."""

    shape: ModelConfig
    context: int
    batch: int
    device: torch.device

    def __post_init__(self) -> None:
        shape, num_pages = self.shape, -(-self.context // _PAGE_SIZE)
        self.pool = PagePool(
            num_pages=num_pages * self.batch, page_size=_PAGE_SIZE, num_layers=_LAYERS,
            num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
            dtype=getattr(torch, shape.torch_dtype), device=self.device,
        )  # fmt: skip
        self.pool.allocate(num_pages * self.batch)
        self.pool.kv.normal_()
        rules = (ScoreRule(shape.head_dim**-0.5),) * _LAYERS
        rotations = (build_rotation(shape.rope, self.context + 1, self.device),) * _LAYERS
        self.attention = PagedAttention(self.pool, rotations, rules, shape.num_qo_heads)
        tails = [
            ReadSpan(range(n * num_pages, (n + 1) * num_pages), 0, self.context, 0)
            for n in range(self.batch)
        ]
        self.rows = [DecodeRow(self.context - 1, (), tail) for tail in tails]
        last = self.context - 1
        slots = [span.pages[-1] * _PAGE_SIZE + last % _PAGE_SIZE for span in tails]
        self.slots = torch.tensor(slots).to(self.device)
        self.positions = torch.full((self.batch,), last).to(self.device)
        heads = shape.num_qo_heads, shape.num_kv_heads, shape.num_kv_heads
        self.qkv = [torch.randn(self.batch, n, shape.head_dim).to(self.pool.kv) for n in heads]

    def arm(self, rows: Sequence[DecodeRow]) -> Callable[[], float]:
        """A timer of one layer's attention of ``rows`` (s)."""
        if self.device.type == "cuda":
            return self._graph_timer(rows)

        def run() -> float:
            attend = self.attention.step(StepRows(rows, [], self.slots, self.positions))
            start = time.perf_counter()
            for layer in range(_LAYERS):
                attend(layer, *self.qkv)
            return (time.perf_counter() - start) / _LAYERS

        return run

    def selecting(self, select: Select) -> list[SelectingRow]:
        """The rows with the policy of ``select``."""
        policy, sealed = make_policy(select, _PAGE_SIZE), (self.context - 1) // _PAGE_SIZE
        assert policy is not None, "the policy chooses pages"
        return [SelectingRow(row.position, (), row.tail, policy, sealed) for row in self.rows]

    def bytes_read(self, rows: Sequence[DecodeRow]) -> float:
        """Bytes that one layer reads for rows with selection."""
        attend = self.attention.step(StepRows(rows, [], self.slots, self.positions))
        for layer in range(_LAYERS):
            attend(layer, *self.qkv)
        [selected] = attend.reads.selected
        per_page = self.pool.bytes_per_page / (_LAYERS * self.shape.num_kv_heads)
        read = sum(report.pages * per_page + report.looked_bytes for report in selected.reads())
        return float(read) / _LAYERS

    def _graph_timer(self, rows: Sequence[DecodeRow]) -> Callable[[], float]:
        attend = self.attention.step(StepRows(rows, [], self.slots, self.positions))

        def layers() -> None:
            for layer in range(_LAYERS):
                attend(layer, *self.qkv)

        layers()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers()

        def run(step_lists: object = attend) -> float:
            # `step_lists` keeps alive the lists that the graph reads
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            start.record()
            for _ in range(_REPLAYS):
                graph.replay()
            end.record()
            torch.cuda.synchronize(self.device)
            return float(start.elapsed_time(end)) / 1e3 / _REPLAYS / _LAYERS

        return run

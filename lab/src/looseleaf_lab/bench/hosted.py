"""``bench hosted``: time per token with a host-resident document, by kind of index.

Whole steps of a model of real shape with random weights run through the engine's own runner: plan,
graph, search on host threads, merge, and the transfer of the likeliest token. The baseline is the
same steps with all keys in the GPU's pool. Keys and queries are synthetic (`hosted_layers`); every
kind searches with the effort of the same recall."""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from looseleaf.attention.plan.groups import DecodeRow, ReadSpan
from looseleaf.config import CacheConfig, EngineConfig, IndexConfig, ModelConfig
from looseleaf.config.index import IndexKeys, IndexKind
from looseleaf.engine.runner.runner import Runner
from looseleaf.engine.runner.step_sampler import Arrival
from looseleaf.errors import InvalidOption
from looseleaf.graphs.rows import RowInputs
from looseleaf.index import Heads
from looseleaf.index.host.attend import HostedRead
from looseleaf.index.host.gpu import HostedDevice
from looseleaf.index.host.window import HostedWindow, WindowRow, WindowShape
from looseleaf.models import Decoder
from looseleaf.models.layers import DecoderWeights
from looseleaf.ops.native.host_memory import host_zeros
from looseleaf.ops.rotate import rotate
from looseleaf.rope import layer_rotations
from looseleaf.types import Attend
from looseleaf_lab.bench.hosted_layers import (
    BuiltLayer,
    SyntheticKeys,
    build_layer,
    fill,
    host_layers,
)
from looseleaf_lab.bench.model_shapes import model_shape
from looseleaf_lab.bench.progress import SILENT, Progress
from looseleaf_lab.bench.random_model import random_weights
from looseleaf_lab.bench.results import Row
from looseleaf_lab.bench.timing import Samples, measure_in_turn

_OWN = 64  # tokens of the request outside of the document
# queries per KV head: nearly as many as a layer uses in all runs
_QUERIES = 512


@dataclass(frozen=True)
class HostedBench:
    """Sizes of the benchmark.

    ``kinds`` of index (the suffix ``-int8`` compares int8 copies of the keys) run with each of the
    ``windows`` of revised rows (`Revise`), over ``contexts``; ``dense`` adds dense decoding. Of the
    shape's layers, ``num_layers`` run, over ``copies`` distinct memories and ``distinct`` synthetic
    KV heads. ``threads`` host threads find ``count`` keys per query head with ``recall``."""

    shape: str
    layer: str
    contexts: Sequence[int]
    kinds: Sequence[str]
    windows: Sequence[int]
    dense: bool
    num_layers: int
    distinct: int
    copies: int
    count: int
    recall: float
    sample: float
    threads: int
    new_tokens: int
    repetitions: int

    def __post_init__(self) -> None:
        model_shape(self.shape)
        if not torch.cuda.is_available():
            raise InvalidOption("bench hosted needs a CUDA device: bench index measures a CPU")


def measure(bench: HostedBench, progress: Progress = SILENT) -> Iterator[Row]:
    """A row per context and arm."""
    on_stage = progress.stage
    device = torch.device("cuda")
    shape = replace(model_shape(bench.shape), num_layers=bench.num_layers)
    dtype: torch.dtype = getattr(torch, shape.torch_dtype)
    with ThreadPoolExecutor(1) as pool:
        on_stage("synthesizing keys while the model is built")
        synthesis = pool.submit(_make, bench, shape, dtype, max(bench.contexts), bench.copies)
        decoder = QueryDecoder(shape, random_weights(shape, dtype, device))
        # a small first run compiles kernels before any timing
        warm_keys, warm_kv = _make(replace(bench, distinct=1), shape, dtype, 512, 1)
        warm_bench = replace(bench, repetitions=1)
        list(_measure_context(warm_bench, decoder, warm_keys, warm_kv, SILENT))
        on_stage("the model is ready")
        synthetic, memory = synthesis.result()
        on_stage("the keys are ready")
    for context in progress.over(bench.contexts, lambda n: f"{n} tokens", float):
        kv = memory[:, :, :, :context]
        yield from _measure_context(bench, decoder, synthetic.first(context), kv, progress)


def _make(
    bench: HostedBench, shape: ModelConfig, dtype: torch.dtype, num_tokens: int, copies: int
) -> tuple[SyntheticKeys, Tensor]:
    """Synthetic keys, and the memory of ``copies`` layers filled with them."""
    heads = Heads(shape.num_layers, shape.num_qo_heads, shape.num_kv_heads)
    synthetic = SyntheticKeys.create(
        bench.layer, num_tokens, heads, bench.distinct, _QUERIES, dtype
    )
    layer_shape = 2, shape.num_kv_heads, num_tokens, shape.head_dim
    memory = host_zeros((min(copies, shape.num_layers), *layer_shape), dtype)
    fill(memory, synthetic)
    return synthetic, memory


def _measure_context(
    bench: HostedBench,
    decoder: "QueryDecoder",
    synthetic: SyntheticKeys,
    kv: Tensor,
    progress: Progress,
) -> Iterator[Row]:
    on_stage = progress.stage
    device, context, shape = decoder.device, kv.shape[3], decoder.config
    heads = Heads(shape.num_layers, shape.num_qo_heads, shape.num_kv_heads)
    config = IndexConfig(sample=bench.sample)
    exact = synthetic.exact(config, bench.count, device)
    built: dict[str, BuiltLayer] = {}
    arms: dict[str, _Arm] = {}
    for kind in bench.kinds:
        on_stage(f"{context} tokens, {kind}: building")
        built[kind] = build_layer(
            synthetic, heads, _config(config, kind), exact=exact, target_recall=bench.recall,
            device=device, workers=min(4, bench.distinct), threads=bench.threads,
        )  # fmt: skip
        on_stage(f"{context} tokens, {kind}: built in {built[kind].seconds:.1f} s, first step")
        segment = host_layers(synthetic, kv, built[kind], heads)
        read = HostedRead(segment, 0, bench.count)
        for window in bench.windows:
            name = kind if window == 1 else f"{kind}-w{window}"
            arms[name] = _Arm(bench, decoder, synthetic, read, context, _OWN, window)
    if bench.dense:
        arms["dense"] = _Arm(bench, decoder, synthetic, None, context, context + _OWN)
    bare = _Arm(bench, decoder, synthetic, None, context, _OWN)
    on_stage(f"{context} tokens: measuring")
    runs = {name: arm.run for name, arm in arms.items()} | {"": bare.run}
    samples = measure_in_turn(runs, bench.repetitions, progress=progress)
    base_ms = samples[""].median * 1e3
    on_stage(f"{context} tokens: {base_ms:.2f} ms per token without a document")
    for name, arm in arms.items():
        row = _row(bench, name, arm, samples, built) | {"context": context}
        if arm.read is not None:
            on_stage(_breakdown(row, base_ms))
        yield row


def _breakdown(row: Row, base_ms: float) -> str:
    """The parts of a token's time (ms): the model without the document, the search, and the rest:
    copies, synchronization, and a launch after the last read."""
    token, search, layers = (float(row[name]) for name in ("token_ms", "search_ms", "layers"))
    transfer = token - base_ms - search
    parts = {"without a document": base_ms, "searching": search, "between": transfer}
    breakdown = ", ".join(f"{name} {ms:.2f}" for name, ms in parts.items())
    per_layer = ", ".join(f"{ms / layers * 1e3:.0f}" for ms in parts.values())
    label = f"{row['context']} tokens, {row['arm']}"
    return f"{label}: {token:.2f} ms: {breakdown} (us a layer: {per_layer})"


def _config(base: IndexConfig, name: str) -> IndexConfig:
    kind, _, keys = name.partition("-")
    return replace(base, kind=cast(IndexKind, kind), keys=cast(IndexKeys, keys or "stored"))


def _row(
    bench: HostedBench,
    name: str,
    arm: "_Arm",
    samples: Mapping[str, Samples],
    built: Mapping[str, BuiltLayer],
) -> Row:
    ms = samples[name].map(lambda seconds: seconds * 1e3)
    kind = name.partition("-w")[0]
    layer_index = built.get(kind)
    layers = bench.num_layers
    build_s = (
        0.0
        if layer_index is None
        else layer_index.seconds * layers * arm.num_kv_heads / bench.distinct
    )
    saved_s = samples["flat"].median - samples[name].median if "flat" in samples else 0.0
    pays = build_s / saved_s if saved_s > 0 else float("inf")
    return {
        "shape": bench.shape,
        "layers": layers,
        "copies": min(bench.copies, layers),
        "layer": bench.layer,
        "context": 0,
        "arm": name,
        "found": bench.count,
        "recall": layer_index.recall if layer_index else 1.0,
        "scanned": layer_index.scanned if layer_index else 1.0,
        "effort": max(u.effort for u in layer_index.index.units.values()) if layer_index else 0,
        "threads": bench.threads,
        "token_ms": ms.median,
        "token_least": ms.range[0],
        "token_most": ms.range[1],
        "search_ms": statistics.median(arm.searched[-bench.repetitions :]) * 1e3,
        "device_gib": arm.device_bytes / 2**30,
        "pool_gib": arm.pool_bytes / 2**30,
        "host_gib": arm.host_bytes / 2**30,
        "build_s": build_s,
        "bytes_per_token": layer_index.bytes_per_token if layer_index else 0.0,
        "pays_after_tokens": pays,
        "new_tokens": bench.new_tokens,
        "repetitions": bench.repetitions,
    }


class _Arm:
    """Steps of one request over a document of ``context`` tokens, host-resident as ``read`` if
    given; the last ``pool_tokens`` tokens are in the pool."""

    def __init__(
        self,
        bench: HostedBench,
        decoder: "QueryDecoder",
        synthetic: SyntheticKeys,
        read: HostedRead | None,
        context: int,
        pool_tokens: int,
        window: int = 1,
    ) -> None:
        shape = decoder.config
        self.size, self.rows = window, 0
        self.window: HostedWindow | None = None
        self.bench, self.decoder, self.read, self.context = bench, decoder, read, context
        self.num_kv_heads = shape.num_kv_heads
        pages = -(-pool_tokens // 16)
        # the queries of all steps, and the number of the next step
        self.queries, self._next = self._rotated_queries(synthetic), 0
        max_tokens = context + _OWN + len(self.queries)
        bytes_before = torch.cuda.memory_allocated()
        config = EngineConfig(
            device="cuda", max_model_len=max_tokens, cache=CacheConfig(num_pages=pages)
        )
        self.runner = Runner.create(decoder, config, max_tokens)
        self.pool_bytes = self.runner.pool.kv.numel() * self.runner.pool.kv.element_size()
        self.runner.pool.allocate(pages)
        if read is None:
            self.runner.pool.kv.normal_()
        self.pages = list(range(pages))
        hosted = self.runner.attention.hosted
        assert isinstance(hosted, HostedDevice)
        hosted.threads, hosted.sample = bench.threads, 0.0
        self.hosted = hosted
        # one value per run, with the warm-up
        self.searched: list[float] = []
        self.host_bytes = 0
        if read is not None and read.segment.index is not None:
            # of all layers, although some share memory
            stored = synthetic.keys.numel() * synthetic.keys.element_size() * 2 * shape.num_layers
            self.host_bytes = stored + read.segment.index.num_bytes
        # fill the window
        for _ in range(window):
            self._step()
        self.run()
        self.device_bytes = torch.cuda.memory_allocated() - bytes_before

    def run(self) -> float:
        """Mean seconds of a step.

        As in an engine, the host plans a step while the device computes the previous one, and reads
        its token after the next launch. The first step is not timed: it wakes threads and refills
        caches."""
        steps = self.bench.new_tokens
        previous = Arrival.of(self._step())
        torch.cuda.synchronize()
        self.hosted.settle()
        searched, start = self.hosted.seconds, time.perf_counter()
        for _ in range(steps):
            arrival = Arrival.of(self._step())
            previous.wait()
            previous = arrival
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / steps
        self.hosted.settle()
        self.searched.append((self.hosted.seconds - searched) / steps)
        return seconds

    def _step(self) -> Tensor:
        """Launch the next step; returns its token, on the device."""
        self.decoder.queries.copy_(self.queries[self._next], non_blocking=True)
        length = len(self.pages) * 16
        if self._next == 0:
            # positions restart, and the rows of a window must be contiguous
            self.rows, self.window = 0, self._new_window()
        self.rows = min(self.rows + 1, self.size)
        position = self.context + _OWN + self._next
        self._next = (self._next + 1) % len(self.queries)
        rows = [self._row(position, length, age) for age in range(self.rows)]
        # each step rewrites the last own token: the time does not depend on one token
        last = length - 1 - np.arange(self.rows)
        table = np.stack([np.ones_like(last), last, last]).astype(np.int64)
        graphs = self.runner.graphs
        assert graphs is not None, "a GPU replays graphs"
        result = graphs.run(RowInputs(table, [0]), rows, (), None)
        assert result is not None, "a graph captures these rows"
        return result.logits.argmax()

    def _new_window(self) -> HostedWindow | None:
        shape = self.decoder.config
        sizes = WindowShape(shape.num_layers, shape.num_qo_heads, shape.head_dim)
        return HostedWindow(sizes, self.size) if self.size > 1 else None

    def _row(self, newest: int, length: int, age: int) -> DecodeRow:
        """The row ``age`` steps older than the one at ``newest``."""
        span = ReadSpan(self.pages, self.context + _OWN - length, length - age, 0)
        reads = (self.read,) if self.read else ()
        window_row = None if self.window is None else WindowRow(self.window, age)
        return DecodeRow(newest - age, (), span, hosted=reads, window=window_row)

    def _rotated_queries(self, synthetic: SyntheticKeys) -> Tensor:
        """The queries of all steps, ``[steps, layers, 1, heads, head_dim]``, rotated back from
        their positions. A layer reuses a query only after all others, so caches stay cold."""
        shape, heads = self.decoder.config, self.decoder.config.num_qo_heads
        group = heads // shape.num_kv_heads
        num_queries = synthetic.test_queries.shape[1]
        steps = num_queries // group
        generator = torch.Generator().manual_seed(2)
        choices = torch.stack([
            torch.randperm(num_queries, generator=generator)[: steps * group].view(steps, group)
            for _ in range(shape.num_layers * shape.num_kv_heads)
        ], 1).view(steps, shape.num_layers, heads)  # fmt: skip
        queries = synthetic.test_queries[torch.arange(heads) // group, choices]
        rotations = layer_rotations(shape, self.context + _OWN + steps)
        positions = torch.arange(steps) + self.context + _OWN
        rotated = [
            rotate(queries[:, layer], positions, replace(rotation, sin=-rotation.sin))
            for layer, rotation in enumerate(rotations)
        ]
        return torch.stack(rotated, 1)[:, :, None].to(self.decoder.device, self.decoder.dtype)


class QueryDecoder(Decoder):
    """A decoder with prepared queries: ``queries`` has one row per layer."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        super().__init__(config, weights)
        size = config.num_layers, 1, config.num_qo_heads, config.head_dim
        self.queries = torch.zeros(size, dtype=self.dtype, device=self.device)

    def forward(self, tokens: Tensor, attend: Attend, *arguments: Any, **options: Any) -> Tensor:
        """The base decoder's pass with other queries."""
        return super().forward(tokens, _QueryAttend(attend, self.queries), *arguments, **options)


@dataclass(frozen=True)
class _QueryAttend:
    attend: Attend
    queries: Tensor

    def __call__(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        return self.attend(layer, self.queries[layer].expand_as(q), k, v)

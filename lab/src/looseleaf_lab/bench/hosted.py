"""``bench hosted``: time of a token whose document is in the host's memory, by kind of index.

Whole steps of a model of real shape with random weights, through the engine's own runner: plan,
graph, search on threads of the host, merge, and the likeliest token back. Beside them the same
steps with all keys in the GPU's pool. What is asked and found is made (`hosted_layers`); every kind
searches as thoroughly as the same recall takes."""

import statistics
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from looseleaf.attention.host.attend import HostedRead
from looseleaf.attention.host.gpu import HostedDevice
from looseleaf.attention.host.window import HostedWindow, WindowRow, WindowShape
from looseleaf.attention.plan.groups import DecodeRow, ReadSpan
from looseleaf.config import CacheConfig, EngineConfig, IndexConfig, ModelConfig
from looseleaf.config.index import IndexKeys, IndexKind
from looseleaf.engine.runner.batch import Arrival
from looseleaf.engine.runner.runner import Runner
from looseleaf.errors import InvalidOption
from looseleaf.graphs.rows import RowInputs
from looseleaf.index import Heads
from looseleaf.models import Decoder
from looseleaf.models.layers import DecoderWeights
from looseleaf.ops.native.host_memory import host_zeros
from looseleaf.ops.rotate import rotate
from looseleaf.rope import layer_rotations
from looseleaf.types import Attend, LayerHook
from looseleaf_lab.bench.hosted_layers import Built, MadeKeys, build_layer, fill, host_layers
from looseleaf_lab.bench.progress import SILENT, Progress
from looseleaf_lab.bench.random_model import model_shape, random_weights
from looseleaf_lab.bench.results import Row
from looseleaf_lab.bench.timing import Repeated, measure_in_turn

_OWN = 64  # tokens of the request besides the document
# queries of a KV head: as many as a layer is asked by in all runs, or nearly
_ASKED = 512


@dataclass(frozen=True)
class HostedBench:
    """What is measured: ``kinds`` of index (with ``-int8`` behind it, one that compares such copies
    of the keys), each with the last rows of each of the ``windows`` revised (`Revise`), and dense
    decoding where ``dense`` says so, over ``contexts``; ``num_layers`` of
    the shape's, which read ``copies`` places of memory in turn; ``distinct`` made KV heads;
    ``count`` keys found by each query head with ``recall``, ends besides, by ``threads`` threads of
    the host."""

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
    """A row for every context and arm."""
    on_stage = progress.stage
    device = torch.device("cuda")
    shape = replace(model_shape(bench.shape), num_layers=bench.num_layers)
    dtype: torch.dtype = getattr(torch, shape.torch_dtype)
    with ThreadPoolExecutor(1) as beside:
        on_stage("making keys, and the model beside them")
        making = beside.submit(_make, bench, shape, dtype, max(bench.contexts), bench.copies)
        decoder = AskingDecoder(shape, random_weights(shape, dtype, device))
        # so that nothing is compiled while something is timed
        few, little = _make(replace(bench, distinct=1), shape, dtype, 512, 1)
        warm = replace(bench, repetitions=1)
        list(_measure_context(warm, decoder, few, little, SILENT))
        on_stage("the model is there")
        made, room = making.result()
        on_stage("keys are there")
    for context in progress.over(bench.contexts, lambda n: f"{n} tokens", float):
        kv = room[:, :, :, :context]
        yield from _measure_context(bench, decoder, made.first(context), kv, progress)


def _make(
    bench: HostedBench, shape: ModelConfig, dtype: torch.dtype, num_tokens: int, copies: int
) -> tuple[MadeKeys, Tensor]:
    """Made keys, and the memory of ``copies`` layers that has them."""
    heads = Heads(shape.num_layers, shape.num_qo_heads, shape.num_kv_heads)
    made = MadeKeys.create(bench.layer, num_tokens, heads, bench.distinct, _ASKED, dtype)
    each = 2, shape.num_kv_heads, num_tokens, shape.head_dim
    room = host_zeros((min(copies, shape.num_layers), *each), dtype)
    fill(room, made)
    return made, room


def _measure_context(
    bench: HostedBench,
    decoder: "AskingDecoder",
    made: MadeKeys,
    kv: Tensor,
    progress: Progress,
) -> Iterator[Row]:
    on_stage = progress.stage
    device, context, shape = decoder.device, kv.shape[3], decoder.config
    heads = Heads(shape.num_layers, shape.num_qo_heads, shape.num_kv_heads)
    config = IndexConfig(sample=bench.sample)
    exact = made.exact(config, bench.count, device)
    built: dict[str, Built] = {}
    arms: dict[str, _Arm] = {}
    for kind in bench.kinds:
        on_stage(f"{context} tokens, {kind}: building")
        built[kind] = build_layer(
            made, heads, _config(config, kind), exact=exact, wanted=bench.recall,
            device=device, workers=min(4, bench.distinct), threads=bench.threads,
        )  # fmt: skip
        on_stage(f"{context} tokens, {kind}: built in {built[kind].seconds:.1f} s, first step")
        segment = host_layers(made, kv, built[kind], heads)
        read = HostedRead(segment, 0, bench.count)
        for window in bench.windows:
            name = kind if window == 1 else f"{kind}-w{window}"
            arms[name] = _Arm(bench, decoder, made, read, context, _OWN, window)
    if bench.dense:
        arms["dense"] = _Arm(bench, decoder, made, None, context, context + _OWN)
    bare = _Arm(bench, decoder, made, None, context, _OWN)
    on_stage(f"{context} tokens: measuring")
    runs = {name: arm.run for name, arm in arms.items()} | {"": bare.run}
    taken = measure_in_turn(runs, bench.repetitions, progress=progress)
    alone = taken[""].median * 1e3
    on_stage(f"{context} tokens: {alone:.2f} ms a token that reads no document")
    for name, arm in arms.items():
        row = _row(bench, name, arm, taken, built) | {"context": context}
        if arm.read is not None:
            on_stage(_parts(row, alone))
        yield row


def _parts(row: Row, alone: float) -> str:
    """What a token's time is made of: the model without the document, the host's part, and what is
    between them: copies, waiting for one another, and a launch that follows the last read."""
    token, search, layers = (float(row[name]) for name in ("token_ms", "search_ms", "layers"))
    between = token - alone - search
    parts = {"without a document": alone, "searching": search, "between": between}
    listed = ", ".join(f"{name} {ms:.2f}" for name, ms in parts.items())
    each = ", ".join(f"{ms / layers * 1e3:.0f}" for ms in parts.values())
    return f"{row['context']} tokens, {row['arm']}: {token:.2f} ms: {listed} (us a layer: {each})"


def _config(base: IndexConfig, name: str) -> IndexConfig:
    kind, _, keys = name.partition("-")
    return replace(base, kind=cast(IndexKind, kind), keys=cast(IndexKeys, keys or "stored"))


def _row(
    bench: HostedBench,
    name: str,
    arm: "_Arm",
    taken: Mapping[str, Repeated],
    built: Mapping[str, Built],
) -> Row:
    ms = taken[name].map(lambda seconds: seconds * 1e3)
    kind = name.partition("-w")[0]
    own = built.get(kind)
    layers = bench.num_layers
    build_s = 0.0 if own is None else own.seconds * layers * arm.num_kv_heads / bench.distinct
    saved = taken["flat"].median - taken[name].median if "flat" in taken else 0.0
    pays = build_s / saved if saved > 0 else float("inf")
    return {
        "shape": bench.shape,
        "layers": layers,
        "copies": min(bench.copies, layers),
        "layer": bench.layer,
        "context": 0,
        "arm": name,
        "found": bench.count,
        "recall": own.recall if own else 1.0,
        "scanned": own.scanned if own else 1.0,
        "effort": max(u.effort for u in own.index.units.values()) if own else 0,
        "threads": bench.threads,
        "token_ms": ms.median,
        "token_least": ms.range[0],
        "token_most": ms.range[1],
        "search_ms": statistics.median(arm.searched[-bench.repetitions :]) * 1e3,
        "device_gib": arm.device_bytes / 2**30,
        "pool_gib": arm.pool_bytes / 2**30,
        "host_gib": arm.host_bytes / 2**30,
        "build_s": build_s,
        "bytes_per_token": own.bytes_per_token if own else 0.0,
        "pays_after_tokens": pays,
        "new_tokens": bench.new_tokens,
        "repetitions": bench.repetitions,
    }


class _Arm:
    """Steps of one request behind a document of ``context`` tokens, of which ``read`` is hosted, if
    it is; the last ``held`` tokens are in the pool."""

    def __init__(
        self,
        bench: HostedBench,
        decoder: "AskingDecoder",
        made: MadeKeys,
        read: HostedRead | None,
        context: int,
        held: int,
        window: int = 1,
    ) -> None:
        shape = decoder.config
        self.size, self.rows = window, 0
        self.window: HostedWindow | None = None
        self.bench, self.decoder, self.read, self.context = bench, decoder, read, context
        self.num_kv_heads = shape.num_kv_heads
        pages = -(-held // 16)
        # what is asked in a step, and which step comes next
        self.asked, self._next = self._ask(made), 0
        most = context + _OWN + len(self.asked)
        before = torch.cuda.memory_allocated()
        config = EngineConfig(device="cuda", max_model_len=most, cache=CacheConfig(num_pages=pages))
        self.runner = Runner.create(decoder, config, most)
        self.pool_bytes = self.runner.pool.kv.numel() * self.runner.pool.kv.element_size()
        self.runner.pool.allocate(pages)
        if read is None:
            self.runner.pool.kv.normal_()
        self.pages = list(range(pages))
        hosted = self.runner.attention.hosted
        assert isinstance(hosted, HostedDevice)
        hosted.threads, hosted.sample = bench.threads, 0.0
        self.hosted = hosted
        # of every run, the warm-up among them
        self.searched: list[float] = []
        self.host_bytes = 0
        if read is not None and read.segment.index is not None:
            # of all layers, also where some read the same memory
            stored = made.keys.numel() * made.keys.element_size() * 2 * shape.num_layers
            self.host_bytes = stored + read.segment.index.num_bytes
        # until the window is full
        for _ in range(window):
            self._step()
        self.run()
        self.device_bytes = torch.cuda.memory_allocated() - before

    def run(self) -> float:
        """Seconds of a step: each is planned while the device computes the one before, as an engine
        does, and its token read behind the launch of the next. One before them is not timed: it
        wakes threads, and what others have left in the caches is not what a step leaves."""
        steps = self.bench.new_tokens
        arriving = Arrival.of(self._step())
        torch.cuda.synchronize()
        self.hosted.settle()
        spent, begun = self.hosted.seconds, time.perf_counter()
        for _ in range(steps):
            arrival = Arrival.of(self._step())
            arriving.wait()
            arriving = arrival
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - begun) / steps
        self.hosted.settle()
        self.searched.append((self.hosted.seconds - spent) / steps)
        return seconds

    def _step(self) -> Tensor:
        """Launch the next step; its token, on the device."""
        self.decoder.asked.copy_(self.asked[self._next], non_blocking=True)
        length = len(self.pages) * 16
        if self._next == 0:
            # places begin anew, and rows of a window stand one behind the other
            self.rows, self.window = 0, self._new_window()
        self.rows = min(self.rows + 1, self.size)
        position = self.context + _OWN + self._next
        self._next = (self._next + 1) % len(self.asked)
        rows = [self._row(position, length, age) for age in range(self.rows)]
        # the last of the own tokens, again and again: a token more or less is nothing
        last = length - 1 - np.arange(self.rows)
        table = np.stack([np.ones_like(last), last, last]).astype(np.int64)
        graphs = self.runner.graphs
        assert graphs is not None, "a GPU replays graphs"
        result = graphs.run(RowInputs(table, [0]), rows, (), None)
        assert result is not None, "few rows are for a graph"
        return result.logits.argmax()

    def _new_window(self) -> HostedWindow | None:
        shape = self.decoder.config
        sizes = WindowShape(shape.num_layers, shape.num_qo_heads, shape.head_dim)
        return HostedWindow(sizes, self.size) if self.size > 1 else None

    def _row(self, newest: int, length: int, age: int) -> DecodeRow:
        """The row ``age`` before the one at ``newest``."""
        span = ReadSpan(self.pages, self.context + _OWN - length, length - age, 0)
        reads = (self.read,) if self.read else ()
        at = None if self.window is None else WindowRow(self.window, age)
        return DecodeRow(newest - age, (), span, hosted=reads, window=at)

    def _ask(self, made: MadeKeys) -> Tensor:
        """What each step asks, layer by layer, turned back from the place where it is read. A layer
        hears the same again when all was asked: no cache has what a search is about to read."""
        shape, heads = self.decoder.config, self.decoder.config.num_qo_heads
        group = heads // shape.num_kv_heads
        num_asked = made.asked.shape[1]
        steps = num_asked // group
        generator = torch.Generator().manual_seed(2)
        drawn = torch.stack([
            torch.randperm(num_asked, generator=generator)[: steps * group].view(steps, group)
            for _ in range(shape.num_layers * shape.num_kv_heads)
        ], 1).view(steps, shape.num_layers, heads)  # fmt: skip
        asked = made.asked[torch.arange(heads) // group, drawn]
        rotations = layer_rotations(shape, self.context + _OWN + steps)
        places = torch.arange(steps) + self.context + _OWN
        turned = [
            rotate(asked[:, layer], places, replace(rotation, sin=-rotation.sin))
            for layer, rotation in enumerate(rotations)
        ]
        return torch.stack(turned, 1)[:, :, None].to(self.decoder.device, self.decoder.dtype)


class AskingDecoder(Decoder):
    """A decoder that asks what it is told: ``asked`` has the queries of each layer's one row."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        super().__init__(config, weights)
        size = config.num_layers, 1, config.num_qo_heads, config.head_dim
        self.asked = torch.zeros(size, dtype=self.dtype, device=self.device)

    def forward(
        self,
        tokens: Tensor,
        attend: Attend,
        hook: LayerHook | None = None,
        asked: Tensor | None = None,
        hooked: Container[int] | None = None,
    ) -> Tensor:
        """As a decoder does, with other queries."""
        return super().forward(tokens, _Asking(attend, self.asked), hook, asked, hooked)


@dataclass(frozen=True)
class _Asking:
    attend: Attend
    asked: Tensor

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(layer, self.asked[layer].expand_as(q), k, v)

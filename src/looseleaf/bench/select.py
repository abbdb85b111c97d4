"""``bench select``: decoding that reads everything and decoding that chooses, in turn.

Two figures for every context, batch and budget: one layer's attention alone, over random keys, and
a whole token of an engine with random weights. Bytes are counted, not measured: keys and values of
the pages read, and what was looked at to choose them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch

from looseleaf.attention.groups import DecodeRow, ReadSpan
from looseleaf.attention.paged import PagedAttention, StepRows
from looseleaf.attention.selection import SelectingRow
from looseleaf.bench.random_model import MODEL_SHAPES, random_engine
from looseleaf.bench.results import Row
from looseleaf.bench.timing import Repeated, measure_in_turn
from looseleaf.config import CacheConfig, EngineConfig, Select
from looseleaf.engine.engine import Engine
from looseleaf.engine.request import Request, TextPart
from looseleaf.errors import InvalidOption
from looseleaf.kv.pool import PagePool
from looseleaf.rope.frames import build_rotation
from looseleaf.sampling_params import SamplingParams
from looseleaf.sparse import make_policy
from looseleaf.types import ScoreRule

_LAYERS = 4
_SEED_TOKENS = 1_000


@dataclass(frozen=True)
class SelectBench:
    """What is measured: one shape, policy and budget over contexts and batches."""

    shape: str
    policy: Select
    contexts: Sequence[int]
    batches: Sequence[int]
    new_tokens: int
    repetitions: int
    device: torch.device

    def __post_init__(self) -> None:
        if self.shape not in MODEL_SHAPES:
            raise InvalidOption(
                f"unknown shape {self.shape!r}: there are {', '.join(MODEL_SHAPES)}"
            )


def measure(bench: SelectBench, on_done: Callable[[Row], None]) -> list[Row]:
    """A row for attention and one for tokens, of every context and batch; ``on_done`` hears each
    when it is there."""
    rows: list[Row] = []
    for context in bench.contexts:
        for batch in bench.batches:
            for what, arms in (
                ("attention", _attention_arms(bench, context, batch)),
                ("token", _token_arms(bench, context, batch)),
            ):
                taken = measure_in_turn({n: a.run for n, a in arms.items()}, bench.repetitions)
                read = {name: arm.bytes_read() for name, arm in arms.items()}
                rows.append(_row(bench, what, context, batch, taken, read))
                on_done(rows[-1])
    return rows


def _row(
    bench: SelectBench,
    what: str,
    context: int,
    batch: int,
    taken: dict[str, Repeated],
    read: dict[str, float],
) -> Row:
    ms = {name: taken[name].map(lambda seconds: seconds * 1e3) for name in taken}
    return {
        "what": what,
        "shape": bench.shape,
        "select": str(bench.policy),
        "context": context,
        "batch": batch,
        "dense_ms": ms["dense"].median,
        "dense_least": ms["dense"].range[0],
        "dense_most": ms["dense"].range[1],
        "select_ms": ms["select"].median,
        "select_least": ms["select"].range[0],
        "select_most": ms["select"].range[1],
        "speedup": ms["dense"].median / ms["select"].median,
        "dense_mb": read["dense"] / 1e6,
        "select_mb": read["select"] / 1e6,
        "repetitions": bench.repetitions,
    }


@dataclass(frozen=True)
class _Arm:
    """Seconds for one layer or token, and the bytes of keys and values that it reads."""

    run: Callable[[], float]
    bytes_read: Callable[[], float]


def _attention_arms(bench: SelectBench, context: int, batch: int) -> dict[str, _Arm]:
    shape, size = MODEL_SHAPES[bench.shape], 16
    each = -(-context // size)
    pool = PagePool(
        num_pages=each * batch, page_size=size, num_layers=_LAYERS,
        num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        dtype=getattr(torch, shape.torch_dtype), device=bench.device,
    )  # fmt: skip
    pool.allocate(each * batch)
    pool.kv.normal_()
    rules = (ScoreRule(shape.head_dim**-0.5),) * _LAYERS
    rotation = build_rotation(shape.rope, context + 1, bench.device)
    attention = PagedAttention(pool, rotation, rules, shape.num_qo_heads)
    tails = [ReadSpan(range(n * each, (n + 1) * each), 0, context, 0) for n in range(batch)]
    dense = [DecodeRow(context - 1, (), tail) for tail in tails]
    policy = make_policy(replace(bench.policy, dense_layers=()), size)
    assert policy is not None, "the benchmark is of a policy that chooses"
    sealed = (context - 1) // size
    choosing = [SelectingRow(row.position, (), row.tail, policy, sealed) for row in dense]
    slots = torch.tensor([span.pages[-1] * size + (context - 1) % size for span in tails])
    places = torch.full((batch,), context - 1)
    heads = shape.num_qo_heads, shape.num_kv_heads, shape.num_kv_heads
    q, k, v = (torch.randn(batch, n, shape.head_dim).to(pool.kv) for n in heads)

    def arm(rows: Sequence[DecodeRow]) -> _Arm:
        def run() -> float:
            step = StepRows(rows, [], slots.to(bench.device), places.to(bench.device))
            attend = attention.step(step)
            _settle(bench.device)
            begun = time.perf_counter()
            for layer in range(_LAYERS):
                attend(layer, q, k, v)
            _settle(bench.device)
            return (time.perf_counter() - begun) / _LAYERS

        def bytes_read() -> float:
            run()
            per_page = pool.bytes_per_page / (_LAYERS * shape.num_kv_heads)
            reads = [read for some in attention.selected for read in some.reads()]
            if not reads:
                return pool.bytes_per_page * each * batch / _LAYERS
            return sum(read.pages * per_page + read.looked_bytes for read in reads) / _LAYERS

        return _Arm(run, bytes_read)

    return {"dense": arm(dense), "select": arm(choosing)}


def _token_arms(bench: SelectBench, context: int, batch: int) -> dict[str, _Arm]:
    pages = -(-(context + bench.new_tokens + 1) // 16) * batch
    cache = CacheConfig(num_pages=pages, prefix_caching=False)
    most = context + bench.new_tokens + 1
    config = EngineConfig(device=str(bench.device), max_model_len=most, cache=cache)
    engine = random_engine(bench.shape, config, bench.device)
    names = count()

    def arm(select: Select | None) -> _Arm:
        read: list[float] = []

        def run() -> float:
            seconds, found = _decode(engine, bench, (context, batch), select, names)
            read[:] = [found]
            return seconds

        return _Arm(run, lambda: read[0])

    return {"dense": arm(None), "select": arm(bench.policy)}


def _decode(
    engine: Engine,
    bench: SelectBench,
    size: tuple[int, int],
    select: Select | None,
    names: "count[int]",
) -> tuple[float, float]:
    """Seconds a step behind the prompts, and bytes read in one."""
    context, batch = size
    params = SamplingParams(max_tokens=bench.new_tokens + 1, temperature=0.0, ignore_eos=True)
    generator = torch.Generator().manual_seed(0)
    vocab = MODEL_SHAPES[bench.shape].vocab_size
    added = []
    for _ in range(batch):
        prompt = torch.randint(0, min(vocab, _SEED_TOKENS), (context,), generator=generator)
        parts = (TextPart(tuple(prompt.tolist())),)
        request = Request(f"select-{next(names)}", parts, params, select=select)
        added.append(engine.add(request))
    while any(not progress.outputs[0].token_ids for progress in added):
        engine.step()
    done = min(len(progress.outputs[0].token_ids) for progress in added)
    _settle(bench.device)
    begun = time.perf_counter()
    while engine.has_work:
        engine.step()
    _settle(bench.device)
    steps = bench.new_tokens + 1 - done
    seconds = (time.perf_counter() - begun) / steps
    pool = engine.store.pool
    if select is None:
        return seconds, pool.bytes_per_page * -(-context // pool.page_size) * batch
    reports = [progress.output().select for progress in added]
    return seconds, sum(r.bytes_read for r in reports if r is not None) / bench.new_tokens


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

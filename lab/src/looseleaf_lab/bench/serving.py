"""``bench serving``: the main workloads of a server on one engine, each with its floor.

Prompts are random token ids, so tokenizing is not timed. Outputs have a fixed length, and decoding
is greedy. A time to first token runs from the call that adds a request to the step that returns its
token. A time per output token averages steps in which all requests of the batch decode. Floors
count the minimal reads and products: weights once a step, every distinct key and value once a step.
Products count at the rate of the model's dtype, so prompts by FP8 products can pass their floor.
"""

import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import torch

from looseleaf.config import CacheConfig, EngineConfig, Quantize, SchedulerConfig
from looseleaf.config.engine import AttentionCosts, KvDType
from looseleaf.engine.engine import Engine
from looseleaf.engine.progress import RequestProgress
from looseleaf.prompt.request import DocumentPart, PromptParts, Request, TextPart
from looseleaf.sampling_params import SamplingParams
from looseleaf_lab.bench.attention import require_right
from looseleaf_lab.bench.ceilings import Ceilings, measure_ceilings
from looseleaf_lab.bench.layer_work import layer_work
from looseleaf_lab.bench.model_shapes import model_shape
from looseleaf_lab.bench.progress import SILENT, Progress
from looseleaf_lab.bench.random_model import random_decoder, random_engine
from looseleaf_lab.bench.results import Row
from looseleaf_lab.bench.timing import Samples


@dataclass(frozen=True)
class ServingSizes:
    """Sizes of all workloads. ``rates`` are requests/s, with ``arrivals`` requests each;
    ``step_tokens`` bounds the tokens of a step."""

    document: int = 4096
    question: int = 64
    prefix: int = 16_384
    batch: int = 64
    cold: int = 24
    short_prompts: int = 256
    short_prompt: int = 512
    short_output: int = 256
    output: int = 128
    repetitions: int = 5
    rates: tuple[float, ...] = (5.0, 20.0, 60.0)
    arrivals: int = 80
    step_tokens: int = 32_768

    @classmethod
    def small(cls) -> "ServingSizes":
        """Sizes for a few seconds on a laptop's CPU."""
        return cls(
            document=40, question=8, prefix=64, batch=4, cold=4, short_prompts=6,
            short_prompt=20, short_output=5, output=12, repetitions=1, rates=(50.0,), arrivals=6,
        )  # fmt: skip

    @classmethod
    def of_shape(cls, shape: str) -> "ServingSizes":
        """Sizes whose pages and weights fit in 80 GB together, and toy sizes for toy shapes."""
        if shape.startswith("tiny"):
            return cls.small()
        return cls(cold=4, short_prompts=96) if shape == "qwen3-30b-a3b" else cls()

    @property
    def pages(self) -> int:
        """Pages of 16 tokens for the largest line, with a margin; lines run one at a time."""
        private = self.cold * (self.prefix + self.question + self.output)
        short = self.short_prompts * (self.short_prompt + self.short_output)
        shared = self.prefix + self.batch * (self.question + self.output)
        mixed = 10 * self.document + self.arrivals * (self.question + self.output)
        return max(private, short, shared, mixed) // 16 + 4 * self.short_prompts + 64


@dataclass(frozen=True)
class ServingVariant:
    """Engine options that a run compares with the defaults."""

    attention_costs: AttentionCosts = "built-in"
    kv_dtype: KvDType = "auto"
    batch_invariant: bool = False
    quantize: Quantize | None = None
    blocks: str | None = None

    @property
    def changes(self) -> list[str]:
        """Labels of the options that differ from the defaults."""
        changes = ["measured costs"] if self.attention_costs == "measured" else []
        changes += ["fp8 pages"] if self.kv_dtype == "fp8" else []
        changes += [f"{form} weights" for form in (self.quantize, self.blocks) if form is not None]
        return changes + (["batch-invariant"] if self.batch_invariant else [])


class RunTimes(NamedTuple):
    """Seconds until all first tokens, per step in which all requests decode, and in all.

    ``per_token`` is 0 without such a step."""

    first: float
    per_token: float
    total: float


@dataclass(eq=False)
class Workbench:
    """One engine, its ceilings, and a generator of random prompts."""

    name: str
    engine: Engine
    ceilings: Ceilings
    sizes: ServingSizes
    _random: random.Random = field(default_factory=lambda: random.Random(0))
    _names: Iterator[int] = field(default_factory=count)

    @classmethod
    def create(
        cls,
        shape: str,
        sizes: ServingSizes,
        device: torch.device,
        variant: ServingVariant | None = None,
    ) -> "Workbench":
        variant = variant or ServingVariant()
        config = EngineConfig(
            device=str(device),
            max_model_len=6 * sizes.document + sizes.prefix + 1024,
            attention_costs=variant.attention_costs,
            cache=CacheConfig(num_pages=sizes.pages, kv_dtype=variant.kv_dtype),
            scheduler=SchedulerConfig(
                max_num_seqs=max(256, sizes.short_prompts),
                max_num_batched_tokens=sizes.step_tokens,
                batch_invariant=variant.batch_invariant,
            ),
        )
        ceilings = measure_ceilings(device, getattr(torch, model_shape(shape).torch_dtype))
        name = ", ".join([shape, "random", *variant.changes])
        decoder = random_decoder(shape, device, variant.quantize, variant.blocks)
        return cls(name, random_engine(shape, config, device, decoder), ceilings, sizes)

    def text(self, length: int) -> TextPart:
        vocab = self.engine.runner.model.config.vocab_size
        return TextPart(tuple(self._random.choices(range(vocab), k=length)))

    def document(self) -> DocumentPart:
        return DocumentPart(self.text(self.sizes.document).tokens, 0, "document")

    def question(self) -> TextPart:
        return self.text(self.sizes.question)

    def shuffled(self, documents: Sequence[DocumentPart], number: int) -> PromptParts:
        """``number`` of the documents in random order, then a new question."""
        return (*self._random.sample(documents, number), self.question())

    def add(self, prompt: PromptParts, new_tokens: int) -> RequestProgress:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        return self.engine.add(Request(f"bench-{next(self._names)}", prompt, params))

    def run(self, prompts: Sequence[PromptParts], new_tokens: int) -> RunTimes:
        """Times of a run in which all prompts are added together."""
        gc.collect()
        start = time.perf_counter()
        submitted = [self.add(prompt, new_tokens) for prompt in prompts]
        waiting = set(submitted)
        while waiting:
            self.engine.step()
            waiting = {p for p in waiting if p.metrics.first_token is None}
        first = time.perf_counter()
        steps, all_decode = 0, first
        while self.engine.has_work:
            changed = self.engine.step()
            if not any(progress.finished for progress in submitted):
                steps += len(changed) == len(submitted)
                all_decode = time.perf_counter()
        per_token = (all_decode - first) / steps if steps else 0.0
        return RunTimes(first - start, per_token, time.perf_counter() - start)

    def evict_all(self) -> None:
        self.engine.store.evict_idle()

    def floor(self, rows: int, keys_read: int, scores: float) -> float:
        """Minimal seconds of a step of ``rows`` rows with ``keys_read`` distinct keys and
        ``scores`` row-key scores."""
        model = self.engine.runner.model
        shape, weights = model.config, model.weights
        work = layer_work(weights.layers, shape, rows)
        attention = shape.num_layers * shape.num_qo_heads * shape.head_dim
        key = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
        pages = self.engine.runner.pool.kv
        num_bytes = work.num_bytes + weights.lm_head.weight.nbytes
        num_bytes += key * keys_read * pages.itemsize
        return self.ceilings.floor(num_bytes, 2 * work.products + 4 * attention * scores)


def measure(
    shape: str,
    sizes: ServingSizes,
    device: torch.device,
    variant: ServingVariant | None = None,
    lines: Sequence[str] = (),
    progress: Progress = SILENT,
) -> Iterator[Row]:
    """Rows of ``lines`` of `LINES` (default: all) as they are measured.

    Raises BenchmarkRefused if attention is wrong."""
    progress.stage("attention against fp64, the model, ceilings of the device")
    require_right(model_shape(shape), device)
    bench = Workbench.create(shape, sizes, device, variant)
    bench.engine.runner.warm_up()
    gc.collect()
    # a full collection of long-lived objects costs a tenth of a second now and then
    gc.freeze()
    try:
        for name in progress.over(lines or LINES):
            bench.evict_all()
            yield from LINES[name](bench)
            bench.engine.check()
    finally:
        gc.unfreeze()


def _repeat(bench: Workbench, once: Callable[[], RunTimes], warm_up: int = 1) -> list[RunTimes]:
    return [once() for _ in range(warm_up + bench.sizes.repetitions)][warm_up:]


def _row(
    bench: Workbench, label: str, unit: str, values: Sequence[float], floor: float | None
) -> Row:
    """One line; ``floor`` is in its unit, and for a rate it is the ceiling."""
    samples = Samples(tuple(values))
    share = 0.0
    if floor is not None:
        share = samples.median / floor if unit.endswith("/s") else floor / samples.median
    dtype = str(bench.engine.runner.model.dtype).removeprefix("torch.")
    return {
        "model": bench.name,
        "dtype": dtype,
        "measurement": label,
        "unit": unit,
        "looseleaf": samples.median,
        "looseleaf_low": samples.range[0],
        "looseleaf_high": samples.range[1],
        "repetitions": len(values),
        "step_tokens": bench.sizes.step_tokens,
        "floor": floor or 0.0,
        "roofline_share": share,
        "terabytes_per_second": bench.ceilings.bytes_per_second / 1e12,
        "teraflops": bench.ceilings.flops_per_second / 1e12,
    }


def _cached_documents(bench: Workbench) -> Iterator[Row]:
    """Five cached documents, in a new order in each repetition."""
    sizes = bench.sizes
    documents = [bench.document() for _ in range(5)]
    bench.run([(*documents, bench.question())], 1)
    samples = _repeat(bench, lambda: bench.run([bench.shuffled(documents, 5)], 1), warm_up=3)
    keys = 5 * sizes.document + sizes.question
    floor = bench.floor(sizes.question, keys, sizes.question * keys)
    label = f"first token, 5 cached documents of {sizes.document} in new order"
    yield _row(bench, label, "ms", [1e3 * m.first for m in samples], 1e3 * floor)


def _cold_documents(bench: Workbench) -> Iterator[Row]:
    """Requests with three of six documents each, in random order, nothing cached."""
    sizes = bench.sizes

    def once() -> RunTimes:
        bench.evict_all()
        documents = [bench.document() for _ in range(6)]
        prompts = [bench.shuffled(documents, 3) for _ in range(sizes.cold)]
        return bench.run(prompts, sizes.output)

    samples = _repeat(bench, once)
    distinct, question_tokens = 6 * sizes.document, sizes.cold * sizes.question
    read = 3 * sizes.document * question_tokens
    scores = 6 * sizes.document**2 / 2 + read
    floor = bench.floor(distinct + question_tokens, distinct + question_tokens, scores)
    label = f"{sizes.cold} requests, 3 of 6 documents of {sizes.document}, cold"
    yield _row(
        bench, f"{label}: all first tokens", "ms", [1e3 * m.first for m in samples], 1e3 * floor
    )
    tails = sizes.cold * (sizes.question + sizes.output // 2)
    floor = bench.floor(sizes.cold, distinct + tails, sizes.cold * 3 * sizes.document)
    yield _per_token(bench, label, samples, floor)


def _shared_prefix(bench: Workbench) -> Iterator[Row]:
    """Requests with a common prefix."""
    sizes = bench.sizes
    prefix = bench.text(sizes.prefix).tokens

    def once() -> RunTimes:
        prompts = [(TextPart((*prefix, *bench.question().tokens)),) for _ in range(sizes.batch)]
        return bench.run(prompts, sizes.output)

    samples = _repeat(bench, once)
    tails = sizes.batch * (sizes.question + sizes.output // 2)
    floor = bench.floor(sizes.batch, sizes.prefix + tails, sizes.batch * sizes.prefix + tails)
    yield _per_token(
        bench, f"{sizes.batch} requests behind one {sizes.prefix} prefix", samples, floor
    )


def _private_prompts(bench: Workbench) -> Iterator[Row]:
    """Long prompts without a common prefix."""
    sizes = bench.sizes

    def once() -> RunTimes:
        bench.evict_all()
        prompts = [(bench.text(sizes.prefix),) for _ in range(sizes.cold)]
        return bench.run(prompts, sizes.output)

    # long runs vary little: fewer repetitions and no warm-up
    samples = [once() for _ in range(max(1, bench.sizes.repetitions - 3))]
    keys = sizes.cold * (sizes.prefix + sizes.output // 2)
    floor = bench.floor(sizes.cold, keys, keys)
    yield _per_token(bench, f"{sizes.cold} requests, private {sizes.prefix}", samples, floor)


def _decode(bench: Workbench) -> Iterator[Row]:
    """Decode steps behind short prompts of their own, from one row to a batch."""
    sizes = bench.sizes
    for rows in sorted({1, sizes.batch // 4, sizes.batch}):

        def once(rows: int = rows) -> RunTimes:
            bench.evict_all()
            return bench.run([(bench.text(sizes.short_prompt),) for _ in range(rows)], sizes.output)

        samples = _repeat(bench, once)
        keys = rows * (sizes.short_prompt + sizes.output // 2)
        label = f"{rows} requests, private {sizes.short_prompt}"
        yield _per_token(bench, label, samples, bench.floor(rows, keys, keys))


def _short_prompts(bench: Workbench) -> Iterator[Row]:
    """Throughput of ordinary requests, prefill included."""
    sizes = bench.sizes
    number, prompt, output = sizes.short_prompts, sizes.short_prompt, sizes.short_output

    def once() -> RunTimes:
        bench.evict_all()
        return bench.run([(bench.text(prompt),) for _ in range(number)], output)

    samples = _repeat(bench, once)
    prefill = bench.floor(number * prompt, number * prompt, number * prompt**2 / 2)
    keys = number * (prompt + output // 2)
    decode = output * bench.floor(number, keys, keys)
    label = f"{number} requests, {prompt} in, {output} out"
    rates = [number * output / m.total for m in samples]
    yield _row(bench, label, "tokens/s", rates, number * output / (prefill + decode))


def _long_prefill(bench: Workbench) -> Iterator[Row]:
    """The prompt of five documents and a question, as new plain text."""
    sizes = bench.sizes
    length = 5 * sizes.document + sizes.question

    def once() -> RunTimes:
        bench.evict_all()
        return bench.run([(bench.text(length),)], 1)

    samples = _repeat(bench, once)
    floor = bench.floor(length, length, length**2 / 2)
    values = [1e3 * m.first for m in samples]
    yield _row(bench, f"prefill of {length} tokens, one request", "ms", values, 1e3 * floor)


def _request_rates(bench: Workbench) -> Iterator[Row]:
    """First tokens while requests arrive at random: five of eight cached documents each."""
    sizes, rng = bench.sizes, random.Random(1)
    documents = [bench.document() for _ in range(8)]
    bench.run([(document, bench.question()) for document in documents], 1)
    for rate in sizes.rates:
        arrivals, arrival = [], 0.0
        for _ in range(sizes.arrivals):
            arrival += rng.expovariate(rate)
            arrivals.append(arrival)
        prompts = [bench.shuffled(documents, 5) for _ in arrivals]
        first = sorted(_serve(bench, prompts, arrivals))
        label = f"first token at {rate:g} requests/s, 5 cached documents of {sizes.document}"
        middle = first[len(first) // 10 : -(len(first) // 10) or None]
        yield _row(bench, label, "ms", [1e3 * seconds for seconds in middle], None)


def _serve(
    bench: Workbench, prompts: Sequence[PromptParts], arrivals: Sequence[float]
) -> list[float]:
    """Seconds from each arrival to its first token, including the wait for a running step."""
    engine, submitted, start = bench.engine, dict[int, RequestProgress](), time.perf_counter()
    first: dict[int, float] = {}
    while len(first) < len(prompts):
        now = time.perf_counter() - start
        while len(submitted) < len(prompts) and arrivals[len(submitted)] <= now:
            submitted[len(submitted)] = bench.add(prompts[len(submitted)], bench.sizes.output)
        if engine.has_work:
            engine.step()
        for number, progress in submitted.items():
            if number not in first and progress.metrics.first_token is not None:
                first[number] = time.perf_counter() - start - arrivals[number]
    while engine.has_work:
        engine.step()
    return list(first.values())


def _per_token(bench: Workbench, label: str, samples: Sequence[RunTimes], floor: float) -> Row:
    values = [1e3 * m.per_token for m in samples]
    return _row(bench, f"{label}: time per output token", "ms", values, 1e3 * floor)


LINES: Mapping[str, Callable[[Workbench], Iterator[Row]]] = {
    "cached": _cached_documents,
    "cold": _cold_documents,
    "shared": _shared_prefix,
    "private": _private_prompts,
    "decode": _decode,
    "short": _short_prompts,
    "prefill": _long_prefill,
    "rates": _request_rates,
}
"""The lines of the table, by their short names, in order."""

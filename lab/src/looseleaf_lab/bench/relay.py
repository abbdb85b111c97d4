"""``bench relay``: the cost of a prefix that all requests share, against the baselines of
RelayAttention (arXiv 2402.14808): private copies of it, and shared pages without shared reads.

Rows of the operator include the paper's model (equation 10) and its measured speed-ups. The model
is (s + c + 2) / (s/b + c + 7) for s shared and c private keys and b rows. Throughput, and the
request rate at a fixed latency per token, come from whole engines over random weights."""

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import torch

from looseleaf.config import CacheConfig, EngineConfig, SchedulerConfig
from looseleaf.engine.engine import Engine
from looseleaf.engine.progress import RequestProgress
from looseleaf.models import Decoder
from looseleaf.prompt.request import Request, TextPart
from looseleaf.sampling_params import SamplingParams
from looseleaf_lab.bench.arrivals import poisson_arrivals, serve
from looseleaf_lab.bench.attention import AttentionConfig, Bench
from looseleaf_lab.bench.attention_cases import AttentionShape, Case, private, shared
from looseleaf_lab.bench.attention_check import Truth, check
from looseleaf_lab.bench.crossing import Crossing
from looseleaf_lab.bench.progress import SILENT, Progress
from looseleaf_lab.bench.random_model import random_decoder, random_engine
from looseleaf_lab.bench.replays import seconds_of
from looseleaf_lab.bench.results import Row
from looseleaf_lab.bench.timing import Samples, clock_of, measure_in_turn

Prompts = Sequence[tuple[TextPart]]

PARTS = ("operator", "throughput", "few-shot", "rate")
_LEAST_ARRIVALS = 12
_SHOT_OUTPUT = 32
# shares of the throughput of a whole batch, as rates to try
_SHARES = (0.125, 0.25, 0.5, 0.75, 0.875, 1.0)

# A40, 52 heads of 128, 128 private keys, from the published code's table: by rows, then by prefix
PAPER_SPEEDUPS = {
    1: {64: 0.85, 512: 0.73, 2048: 0.85, 8192: 0.94, 16384: 0.97},
    4: {64: 1.01, 512: 1.88, 2048: 2.64, 8192: 3.54, 16384: 3.79},
    16: {64: 1.33, 512: 3.02, 2048: 6.96, 8192: 12.2, 16384: 13.8},
    32: {64: 1.42, 512: 3.63, 2048: 9.56, 8192: 19.9, 16384: 24.1},
    64: {64: 1.36, 512: 4.00, 2048: 11.6, 8192: 29.5, 16384: 40.0},
    128: {64: 1.42, 512: 4.29, 2048: 12.9, 8192: 36.4},
}


@dataclass(frozen=True)
class RelayConfig:
    """Prefixes and batches to sweep, with ``private`` keys per row.

    Engines of ``shape`` answer ``requests`` prompts of ``private`` tokens after a prefix, with
    ``output`` tokens each. A rate is the one whose latency per token is ``latency_factor`` times
    that of a single request; each tried rate lasts about ``rate_seconds``."""

    heads: AttentionShape = field(default_factory=AttentionShape)
    device: str = "cuda"
    prefixes: tuple[int, ...] = (64, 512, 2048)
    batches: tuple[int, ...] = (1, 4, 16, 32)
    private: int = 128
    shape: str = "llama-3.1-8b"
    requests: int = 64
    output: int = 64
    shots: tuple[int, ...] = (1, 3, 5)
    shot_tokens: int = 400
    repetitions: int = 3
    latency_factor: float = 1.5
    rate_seconds: float = 0.7


def predicted(shared_keys: int, private_keys: int, rows: int) -> float:
    """The paper's model of the speed-up over private copies, from elements moved."""
    return (shared_keys + private_keys + 2) / (shared_keys / rows + private_keys + 7)


def measure_operator(config: RelayConfig, progress: Progress = SILENT) -> Iterator[Row]:
    """Decode attention of a layer: one row per arm, prefix and batch.

    Raises BenchmarkRefused if an answer is wrong."""
    cells = [(prefix, rows) for prefix in config.prefixes for rows in config.batches]
    for prefix, rows in progress.over(cells, _cell_name, lambda cell: float(cell[0] * cell[1])):
        yield from _measure_cell(config, prefix, rows, progress)


def _cell_name(cell: tuple[int, int]) -> str:
    return f"decode attention, prefix {cell[0]}, {cell[1]} rows"


def _measure_cell(config: RelayConfig, prefix: int, rows: int, progress: Progress) -> Iterator[Row]:
    sharing_case = shared(config.heads, rows, prefix, tail=config.private)
    private_case = private(config.heads, rows, prefix + config.private)
    pages = max(sharing_case.num_pages, private_case.num_pages)
    sizes = AttentionConfig(config.heads, device=config.device)
    bench = Bench(sizes, pages, max(sharing_case.longest, private_case.longest))
    arms = {
        "relay": _arm(bench, sharing_case, grouping=True),
        "shared pages": _arm(bench, sharing_case, grouping=False),
        "private copies": _arm(bench, private_case, grouping=False),
    }
    samples = measure_in_turn(arms, config.repetitions, progress=progress)
    layers = config.heads.layers
    ours = samples["relay"].median
    for name, seconds in samples.items():
        yield {
            "measurement": "decode attention",
            "model": f"{config.heads.num_qo_heads}/{config.heads.num_kv_heads} heads of "
            f"{config.heads.head_dim}",
            "prefix": prefix,
            "private": config.private,
            "batch": rows,
            "output": 0,
            "arm": name,
            "unit": "us a layer",
            "clock": clock_of(torch.device(config.device).type)[0],
            **_spread(Samples(tuple(1e6 * s / layers for s in seconds.values))),
            "relay_faster": seconds.median / ours,
            "predicted": predicted(prefix, config.private, rows)
            if name == "private copies"
            else "",
            "paper": PAPER_SPEEDUPS.get(rows, {}).get(prefix, "")
            if name == "private copies"
            else "",
        }


def _arm(bench: Bench, case: Case, *, grouping: bool) -> Callable[[], float]:
    q, plan = bench.query(case), bench.plan(case, grouping=grouping)
    truth = Truth(bench.pools[0], bench.rotation, bench.rule)
    check(case, q, bench.layer(q, plan, 0, bench.rotation), truth)
    arm = bench.arm(q, plan)
    if bench.device.type != "cpu":
        return seconds_of(arm, bench.device)
    _, clock = clock_of("cpu")

    def timed() -> float:
        start = clock()
        arm()
        return clock() - start

    return timed


def _spread(samples: Samples) -> dict[str, float]:
    low, high = samples.range
    return {"median": samples.median, "low": low, "high": high}


class Service:
    """An engine for prompts of random tokens; ``grouping`` shares the reads of a prefix."""

    def __init__(self, config: RelayConfig, decoder: Decoder, *, grouping: bool) -> None:
        self.config = config
        longest = max(*config.prefixes, *(n * config.shot_tokens for n in config.shots))
        tokens = longest + config.private + config.output + 64
        settings = EngineConfig(
            device=config.device,
            max_model_len=tokens,
            cache=CacheConfig(num_pages=-(-tokens // 16) * (config.requests + 2)),
            scheduler=SchedulerConfig(max_num_seqs=config.requests, grouping=grouping),
        )
        device = torch.device(config.device)
        self.engine: Engine = random_engine(config.shape, settings, device, decoder)
        # without it, requests would wait for a capture
        self.engine.runner.warm_up()
        self.clock = clock_of(self.engine.runner.model.device.type)[1]
        self._names = count()

    def add(self, prompt: tuple[TextPart], output: int) -> RequestProgress:
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        return self.engine.add(Request(f"relay-{next(self._names)}", prompt, params))

    def batch(self, prompts: Prompts, output: int) -> float:
        """Requests/s of a batch; only the first prompt is cached, as a system prompt would be."""
        self.engine.store.evict_idle()
        self.serve(prompts[:1], [0.0], 1)
        start = self.clock()
        for prompt in prompts:
            self.add(prompt, output)
        while self.engine.has_work:
            self.engine.step()
        return len(prompts) / (self.clock() - start)

    def serve(self, prompts: Prompts, arrivals: Sequence[float], output: int) -> float:
        """Mean seconds per output token, from a prompt's arrival to its last token."""
        waits = serve(
            self.engine, self.clock, lambda number: self.add(prompts[number], output), arrivals
        )
        return sum(wait.last for wait in waits) / len(waits) / output


def make_prompts(
    prefix: int, private: int, number: int, *, shared_prefix: bool, vocabulary: int
) -> Prompts:
    """``number`` prompts with one common prefix, or with private prefixes of the same length."""
    rng = random.Random(f"{prefix} {shared_prefix}")

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(2, vocabulary), k=length))

    first = tokens(prefix)
    return [
        (TextPart((first if shared_prefix else tokens(prefix)) + tokens(private)),)
        for _ in range(number)
    ]


@dataclass(frozen=True)
class _Arm:
    """A service and its kind of prompts: with a common prefix or with private ones."""

    service: Service
    shared_prefix: bool

    def prompts(self, prefix: int, number: int) -> Prompts:
        """``number`` prompts after a prefix."""
        service = self.service
        vocabulary = service.engine.runner.model.config.vocab_size
        return make_prompts(
            prefix,
            service.config.private,
            number,
            shared_prefix=self.shared_prefix,
            vocabulary=vocabulary,
        )


def measure(
    config: RelayConfig, parts: Sequence[str] = PARTS, progress: Progress = SILENT
) -> Iterator[Row]:
    """Rows of ``parts``, in the order of `PARTS`, as they are measured.

    Raises BenchmarkRefused if an answer of the operator is wrong."""
    if "operator" in parts:
        yield from measure_operator(config, progress)
    if not {*parts} - {"operator"}:
        return
    progress.stage("making two engines")
    decoder = random_decoder(config.shape, torch.device(config.device))
    grouped = Service(config, decoder, grouping=True)
    ungrouped = Service(config, decoder, grouping=False)
    arms = {
        "relay": _Arm(grouped, True),
        "shared pages": _Arm(ungrouped, True),
        "no sharing": _Arm(ungrouped, False),
    }
    if "throughput" in parts:
        for prefix in progress.over(config.prefixes, lambda n: f"throughput, prefix {n}"):
            yield from _throughput(arms, ("throughput", prefix, config.output), progress)
    if "few-shot" in parts:
        for shots in progress.over(config.shots, lambda n: f"{n}-shot questions"):
            workload = (f"{shots}-shot questions", shots * config.shot_tokens, _SHOT_OUTPUT)
            yield from _throughput(arms, workload, progress)
    if "rate" in parts:
        for prefix in progress.over(config.prefixes, lambda n: f"rate, prefix {n}"):
            yield from _rates(arms, prefix, progress)


def _throughput(
    arms: Mapping[str, _Arm], workload: tuple[str, int, int], progress: Progress
) -> Iterator[Row]:
    """Requests/s of a whole batch."""
    _, prefix, output = workload
    config = arms["relay"].service.config
    timed = {
        name: partial(arm.service.batch, arm.prompts(prefix, config.requests), output)
        for name, arm in arms.items()
    }
    samples = measure_in_turn(timed, config.repetitions, progress=progress)
    yield from _service_rows(config, workload, samples)


def _rates(arms: Mapping[str, _Arm], prefix: int, progress: Progress) -> Iterator[Row]:
    """The request rate at a latency per token that is the same for all arms.

    Arms alternate over the same arrivals, which change in every repetition."""
    config, relay = arms["relay"].service.config, arms["relay"]
    first, output = relay.prompts(prefix, 1), config.output
    latencies = [relay.service.serve(first, [0.0], output) for _ in range(config.repetitions + 1)]
    limit = config.latency_factor * statistics.median(latencies[1:])
    curves = {name: _curve(arm, prefix, limit) for name, arm in arms.items()}
    for curve in curves.values():
        # the search also captures graphs and compiles kernels
        curve.search()
    timed = {name: curve.refine for name, curve in curves.items()}
    samples = measure_in_turn(timed, config.repetitions, warm_up=0, progress=progress)
    crossings = {
        name: (curve.settle(config.repetitions), samples[name]) for name, curve in curves.items()
    }
    label = f"rate at {config.latency_factor:g} times the latency of one"
    ours = crossings["relay"][0]
    for row in _service_rows(
        config, (label, prefix, output), {name: spread for name, (_, spread) in crossings.items()}
    ):
        rate = crossings[str(row["arm"])][0]
        yield row | {"median": rate, "relay_faster": ours / rate if rate else ""}


def _curve(arm: _Arm, prefix: int, limit: float) -> Crossing:
    """Latency per token of an arm by rate, up to its throughput as a batch: above that rate the
    queue grows without limit."""
    service, config = arm.service, arm.service.config
    prompts = arm.prompts(prefix, config.requests)
    service.batch(prompts[:_LEAST_ARRIVALS], config.output)
    peak_rate = service.batch(prompts, config.output)

    def number_at(rate: float) -> int:
        return max(_LEAST_ARRIVALS, round(rate * config.rate_seconds))

    # the first prompt fills the cache
    cached, *prompts_after_warm = arm.prompts(prefix, 1 + number_at(peak_rate))

    def measure(rate: float, number: int) -> float:
        service.engine.store.evict_idle()
        service.serve([cached], [0.0], 1)
        # equal arrivals for all arms
        arrivals = poisson_arrivals(rate, number_at(rate), number)
        return service.serve(prompts_after_warm, arrivals, config.output)

    return Crossing([share * peak_rate for share in _SHARES], limit, measure)


def _service_rows(
    config: RelayConfig, workload: tuple[str, int, int], samples: dict[str, Samples]
) -> Iterator[Row]:
    label, prefix, output = workload
    ours = samples["relay"].median
    for name, rates in samples.items():
        yield {
            "measurement": label,
            "model": f"{config.shape}, random",
            "prefix": prefix,
            "private": config.private,
            "batch": config.requests,
            "output": output,
            "arm": name,
            "unit": "requests/s",
            "clock": clock_of(torch.device(config.device).type)[0],
            **_spread(rates),
            "relay_faster": ours / rates.median if rates.median else "",
            "predicted": "",
            "paper": "",
        }


def small(device: str) -> RelayConfig:
    """Sizes for a CPU: eight heads of 64 in fp32, and the reference model's shape."""
    heads = AttentionShape(8, 8, 64, layers=2, dtype=torch.float32)
    return replace(
        RelayConfig(heads, device), shape="small", requests=16, output=16, batches=(1, 4, 16, 32),
        latency_factor=3.0,
    )  # fmt: skip

"""``bench tensor-parallel``: one rank against several in the same run, on a random model.

Decode is the time of a step of the engine, prefill and first token are times of a request. One
engine runs after the other, because both would not fit one GPU."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np
import torch

from looseleaf.config import CacheConfig, EngineConfig, Quantize
from looseleaf.engine.engine import Engine
from looseleaf.llm.ranks import start_ranks
from looseleaf.prompt.request import Document, Prompt, Request
from looseleaf.sampling_params import SamplingParams
from looseleaf_lab.bench.model_shapes import model_shape
from looseleaf_lab.bench.progress import SILENT, Progress
from looseleaf_lab.bench.random_model import random_rank
from looseleaf_lab.bench.results import Row

# steps before the timed ones: graphs are captured, and the launch ahead begins
_UNTIMED_STEPS = 8


@dataclass(frozen=True)
class RanksConfig:
    """A shape of `MODEL_SHAPES`, and the numbers of ranks to compare.

    Decode has prompts of ``prompt_tokens``. The first token is that of a question after five cached
    documents of ``document_tokens``."""

    shape: str
    ranks: tuple[int, ...] = (1, 2)
    quantize: Quantize | None = None
    batches: tuple[int, ...] = (1, 64)
    prompt_tokens: int = 256
    prefill_tokens: int = 20_000
    document_tokens: int = 4000
    steps: int = 64
    repetitions: int = 5
    memory_gib: float | None = None
    all_reduce: str = "nccl"

    def engine(self, ranks: int, device: torch.device) -> EngineConfig:
        """The engine's configuration with that many ranks."""
        return EngineConfig(
            device=device.type if ranks > 1 else str(device),
            max_model_len=max(self.prefill_tokens, 5 * self.document_tokens) + 512,
            tensor_parallel=ranks,
            all_reduce=self.all_reduce,  # type: ignore[arg-type]
            cache=CacheConfig(memory_gib=self.memory_gib, prefix_caching=False),
        )


def measure(
    config: RanksConfig, device: torch.device, progress: Progress = SILENT
) -> Iterator[Row]:
    """A row per measurement and number of ranks; ``times_one`` compares with the first number."""
    first: dict[str, float] = {}
    for ranks in config.ranks:
        progress.stage(f"loading {config.shape} on {ranks}")
        for row in _rows(config, ranks, device, progress):
            median = float(row["seconds"])
            yield row | {"times_one": first.setdefault(str(row["work"]), median) / median}
        # the next engine needs the memory
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _rows(
    config: RanksConfig, ranks: int, device: torch.device, progress: Progress
) -> Iterator[Row]:
    """The rows of one number of ranks."""
    engine = make_engine(config, ranks, device)
    weight_gib = weight_bytes(engine) / 2**30
    try:
        for name, seconds in progress.over(list(_works(engine, config)), lambda work: work[0]):
            samples = seconds()
            yield {
                "shape": config.shape,
                "quantize": config.quantize or "none",
                "all_reduce": config.all_reduce,
                "ranks": ranks,
                "work": name,
                "seconds": statistics.median(samples),
                "least": min(samples),
                "most": max(samples),
                "weight_gib": weight_gib,
            }
    finally:
        engine.close()


def make_engine(config: RanksConfig, ranks: int, device: torch.device) -> Engine:
    """The engine over ``ranks`` ranks, with its graphs captured."""
    make = partial(random_rank, config.shape, config.quantize)
    options = config.engine(ranks, device)
    engine = make(options) if ranks == 1 else start_ranks(make, options, device)
    engine.runner.warm_up()
    return engine


def weight_bytes(engine: Engine) -> int:
    """Bytes of the matrices that a decode step reads on rank 0."""
    weights = engine.runner.model.weights
    matrices = [weights.lm_head]
    for layer in weights.layers:
        matrices += [layer.qkv, layer.output, layer.gate_up, layer.down]
    return sum(projection.weight.nbytes for projection in matrices)


def _works(engine: Engine, config: RanksConfig) -> Iterator[tuple[str, Callable[[], list[float]]]]:
    asks = _Asks(engine, model_shape(config.shape).vocab_size)
    for batch in config.batches:
        yield f"decode {batch}", partial(_decode, asks, config, batch)
    yield f"prefill {config.prefill_tokens}", partial(_prefill, asks, config)
    yield f"first token behind 5 x {config.document_tokens}", partial(_first_token, asks, config)


class _Asks:
    """Requests of random tokens to one engine."""

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self.engine = engine
        self._generator, self._vocab_size = np.random.default_rng(0), vocab_size
        self._numbers = count()

    def tokens(self, length: int) -> list[int]:
        """``length`` random tokens."""
        drawn: list[int] = self._generator.integers(2, self._vocab_size, length).tolist()
        return drawn

    def add(self, prompt: Prompt, max_tokens: int) -> None:
        """Add a request with exactly ``max_tokens`` tokens."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        parts = self.engine.prompts.from_parts(prompt)
        self.engine.add(Request(f"bench-{next(self._numbers)}", parts, params, decodes=False))

    def time(self, prompt: Prompt) -> float:
        """Seconds to the first token of a prompt, alone."""
        begun = time.perf_counter()
        self.add(prompt, 1)
        self.run()
        return time.perf_counter() - begun

    def run(self) -> None:
        """Step until all requests have ended."""
        while self.engine.has_work:
            self.engine.step()


def _decode(asks: _Asks, config: RanksConfig, batch: int) -> list[float]:
    """Seconds of a step of ``batch`` outputs, by repetition."""
    total = _UNTIMED_STEPS + config.steps * config.repetitions
    for _ in range(batch):
        asks.add([asks.tokens(config.prompt_tokens)], total + 8)
    engine = asks.engine
    while engine.last_step is None or engine.last_step.decode_rows < batch:
        engine.step()
    for _ in range(_UNTIMED_STEPS):
        engine.step()
    samples = []
    for _ in range(config.repetitions):
        begun = time.perf_counter()
        for _ in range(config.steps):
            engine.step()
        samples.append((time.perf_counter() - begun) / config.steps)
    asks.run()
    return samples


def _prefill(asks: _Asks, config: RanksConfig) -> list[float]:
    """Seconds of the first token of a prompt without documents."""
    prompts = [[asks.tokens(config.prefill_tokens)] for _ in range(config.repetitions + 1)]
    return [asks.time(prompt) for prompt in prompts][1:]


def _first_token(asks: _Asks, config: RanksConfig) -> list[float]:
    """Seconds of the first token of a question after five documents of the pool, in new orders."""
    documents = [
        Document(f"document {n}", token_ids=tuple(asks.tokens(config.document_tokens)))
        for n in range(5)
    ]
    asks.time([*documents, asks.tokens(64)])
    samples = []
    for n in range(config.repetitions + 1):
        turned = documents[n % 5 :] + documents[: n % 5]
        samples.append(asks.time([*turned, asks.tokens(64)]))
    return samples[1:]

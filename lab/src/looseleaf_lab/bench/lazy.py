"""``bench lazy``: the time claims of LazyAttention (arXiv 2606.04302): first tokens and throughput
with documents stored once for all positions.

The baselines are a copy per position, as in serving Block-Attention, and prefix caching. All run in
one engine with one pool. Weights and tokens are random, for speed only. A copy per position is a
document whose first token names the position: it has its own key and the same cost."""

import gc
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice

import torch

from looseleaf.config import CacheConfig, EngineConfig
from looseleaf.engine.engine import Engine
from looseleaf.engine.progress import RequestProgress
from looseleaf.prompt.request import DocumentPart, PromptParts, Request, TextPart
from looseleaf.sampling_params import SamplingParams
from looseleaf_lab.bench.hits import by_popularity
from looseleaf_lab.bench.progress import SILENT, Progress
from looseleaf_lab.bench.random_model import random_engine
from looseleaf_lab.bench.results import Row
from looseleaf_lab.bench.timing import Samples, clock_of

PAPER = {("first token", 2.1): 1.37, ("throughput", 2.1): 1.40}
"""Speed-ups over copies per position at Zipf exponent 2.1, from the paper; uniform
traffic both are equal (Tulu3-Block-FT 8B, H100)."""
_SPECIAL = 64  # smaller token ids name positions


@dataclass(frozen=True)
class LazyConfig:
    """A request reads ``per_request`` of ``documents`` of ``document_tokens``.

    The pool has room for ``capacity`` documents and one request. The first ``skipped`` requests
    fill it. Half of the rest run one after another, half as a batch."""

    shape: str = "llama-3.1-8b"
    device: str = "cuda"
    documents: int = 60
    document_tokens: int = 1024
    per_request: int = 5
    capacity: int = 15
    question: int = 64
    output: int = 16
    requests: int = 64
    skipped: int = 16
    alphas: tuple[float, ...] = (0.0, 2.1)
    breakdown_tokens: int = 4096
    repetitions: int = 3

    @property
    def prompt_tokens(self) -> int:
        return self.per_request * self.document_tokens + self.question


def small(device: str) -> LazyConfig:
    """Sizes for a CPU: the reference model's shape, documents of a page."""
    return replace(
        LazyConfig("small", device),
        documents=30,
        document_tokens=128,
        capacity=8,
        requests=50,
        skipped=15,
        breakdown_tokens=256,
    )


class Service:
    """One engine and the documents of a world."""

    def __init__(self, config: LazyConfig, tokens: int, capacity: int) -> None:
        self.config = config
        longest = config.per_request * tokens + config.question + config.output + 64
        page = 16
        request_pages = -(-longest // page) + 2 * config.per_request + 8
        pages = capacity * -(-tokens // page) + request_pages
        settings = EngineConfig(
            device=config.device, max_model_len=longest, cache=CacheConfig(num_pages=pages)
        )
        self.engine: Engine = random_engine(config.shape, settings, torch.device(config.device))
        vocabulary = range(_SPECIAL, self.engine.runner.model.config.vocab_size)
        rng = random.Random(0)
        self.texts = [tuple(rng.choices(vocabulary, k=tokens)) for _ in range(config.documents)]
        self._vocabulary, self._random = vocabulary, rng
        self.clock = clock_of(self.engine.runner.model.device.type)[1]
        self._names = count()

    def _question(self) -> TextPart:
        return TextPart(tuple(self._random.choices(self._vocabulary, k=self.config.question)))

    def add(self, prompt: PromptParts, output: int) -> RequestProgress:
        """A request that has not started."""
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        return self.engine.add(Request(f"lazy-{next(self._names)}", prompt, params))

    def finish(self) -> None:
        while self.engine.has_work:
            self.engine.step()

    def stored_once(self, numbers: Sequence[int]) -> PromptParts:
        """A prompt of documents that are stored once."""
        parts = [DocumentPart(self.texts[n], 0, f"document {n}") for n in numbers]
        return (*parts, self._question())

    def copy_per_position(self, numbers: Sequence[int]) -> PromptParts:
        """A prompt of documents with a copy for each position."""
        copies = [(position, *self.texts[n][1:]) for position, n in enumerate(numbers)]
        parts = [DocumentPart(tokens, 0, "document") for tokens in copies]
        return (*parts, self._question())

    def as_text(self, numbers: Sequence[int]) -> PromptParts:
        """A prompt of plain text, for prefix caching."""
        tokens = tuple(token for n in numbers for token in self.texts[n])
        return (TextPart(tokens + self._question().tokens),)


def draw(config: LazyConfig, alpha: float) -> list[list[int]]:
    """The documents of each request, by popularity, in random order; ``alpha`` 0 is uniform."""
    rng = random.Random(f"lazy {alpha}")
    orders = by_popularity(rng, config.documents, config.per_request, alpha)
    return list(islice(orders, config.requests))


def measure(config: LazyConfig, progress: Progress = SILENT) -> Iterator[Row]:
    """Rows as they are measured: first tokens and throughput for each skew, then the breakdown."""
    service = Service(config, config.document_tokens, config.capacity)
    # this also compiles kernels and captures graphs
    progress.stage("warm-up")
    _throughput(
        service, [service.stored_once(numbers) for numbers in draw(config, config.alphas[0])]
    )
    parts = [*config.alphas, None]
    for alpha in progress.over(parts, lambda a: "breakdown" if a is None else f"alpha {a}"):
        if alpha is None:
            yield from _breakdown(config, progress)
        else:
            yield from _traffic(service, alpha, progress)


def _traffic(service: Service, alpha: float, progress: Progress) -> Iterator[Row]:
    """Rows of every arm: the first requests fill the pool, half of the rest run one after another,
    the others as a batch."""
    config, orders = service.config, draw(service.config, alpha)
    middle = (config.skipped + config.requests) // 2
    arms: dict[str, Callable[[Sequence[int]], PromptParts]] = {
        "once": service.stored_once,
        "copies per position": service.copy_per_position,
        "prefix caching": service.as_text,
    }
    baseline: tuple[float, float] | None = None
    for name, make_prompt in progress.over(arms.items(), lambda arm: arm[0]):
        service.engine.store.evict_idle()
        prompts = [make_prompt(numbers) for numbers in orders]
        _throughput(service, prompts[: config.skipped])
        first_tokens = Samples(
            tuple(
                1e3 * _first_token(service, prompt)
                for prompt in progress.over(
                    prompts[config.skipped : middle], lambda prompt: "a first token"
                )
            )
        )
        mean, rate = statistics.fmean(first_tokens.values), _throughput(service, prompts[middle:])
        service.engine.check()
        baseline = baseline or (mean, rate)
        yield _row(
            config, ("first token", "ms, mean"), alpha, name, first_tokens, mean, mean / baseline[0]
        )
        label = ("throughput", "requests/s")
        yield _row(config, label, alpha, name, Samples((rate,)), rate, baseline[1] / rate)


def _first_token(service: Service, prompt: PromptParts) -> float:
    start = service.clock()
    service.add(prompt, 1)
    service.finish()
    return service.clock() - start


def _throughput(service: Service, prompts: Sequence[PromptParts]) -> float:
    gc.collect()
    start = service.clock()
    for prompt in prompts:
        service.add(prompt, service.config.output)
    service.finish()
    return len(prompts) / (service.clock() - start)


def _breakdown(config: LazyConfig, progress: Progress) -> Iterator[Row]:
    """Five documents and a question, with none, three and all of the documents cached.

    Documents and question share a step if they fit, so differences between lines are the cost of
    the documents."""
    service = Service(config, config.breakdown_tokens, capacity=0)
    numbers = list(range(config.per_request))
    cases: tuple[tuple[str, list[int]], ...] = (
        ("none cached", []),
        ("3 cached", numbers[:3]),
        ("all cached", numbers),
    )
    for name, cached in progress.over(cases, lambda case: case[0]):
        first, token = [], []
        for repetition in range(config.repetitions + 1):
            service.engine.store.evict_idle()
            for number in cached:
                service.add(service.stored_once([number]), 1)
                service.finish()
            seconds = _stages(service, service.stored_once(numbers))
            if repetition:
                first.append(1e3 * seconds[0])
                token.append(1e3 * seconds[1])
        for stage, samples in (("first token", first), ("a token of output", token)):
            figures = Samples(tuple(samples))
            label = (f"breakdown, {name}: {stage}", "ms")
            yield _row(config, label, 0.0, "once", figures, figures.median, 1.0)


def _stages(service: Service, prompt: PromptParts) -> tuple[float, float]:
    """Seconds to the first token, and per token after it."""
    gc.collect()
    start = service.clock()
    progress = service.add(prompt, service.config.output)
    first = 0.0
    while service.engine.has_work:
        service.engine.step()
        if not first and progress.metrics.first_token is not None:
            first = service.clock() - start
    end = service.clock() - start
    return first, (end - first) / (service.config.output - 1)


def _row(
    config: LazyConfig,
    label_and_unit: tuple[str, str],
    alpha: float,
    arm: str,
    samples: Samples,
    value: float,
    once_faster: float,
) -> Row:
    label, unit = label_and_unit
    is_breakdown = label.startswith("breakdown")
    return {
        "model": f"{config.shape}, random",
        "measurement": label,
        "alpha": "" if is_breakdown else alpha,
        "documents": config.documents,
        "document_tokens": config.breakdown_tokens if is_breakdown else config.document_tokens,
        "per_request": config.per_request,
        "capacity": config.capacity,
        "requests": len(samples.values),
        "arm": arm,
        "unit": unit,
        "clock": clock_of(torch.device(config.device).type)[0],
        "value": value,
        "low": samples.range[0],
        "high": samples.range[1],
        "once_faster": once_faster,
        "paper": PAPER.get((label, alpha), "") if arm == "copies per position" else "",
    }

"""``bench rate``: first tokens while requests arrive, by policy for their documents; the throughput
claims of CacheBlend (arXiv 2405.16444).

Every request reads some documents of a world in its own order, then a question. The arms are full
recompute of the prompt as text, prefix caching, plain reuse, and reuse with a share of the tokens
recomputed. Rates rise until a first token takes `LIMIT` times an unloaded full recompute. Unloaded
first tokens are also measured for other numbers and lengths of documents, and for batches.
MapReduce and MapRerank ask about each document separately. Weights and tokens are random: the
figures are times, never quality."""

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import torch

from looseleaf.config import CacheConfig, EngineConfig, Fuse
from looseleaf.engine.engine import Engine
from looseleaf.engine.progress import RequestProgress
from looseleaf.prompt.request import DocumentPart, PromptParts, Request, TextPart
from looseleaf.sampling_params import SamplingParams
from looseleaf_lab.bench.arrivals import poisson_arrivals, serve
from looseleaf_lab.bench.progress import SILENT, Progress
from looseleaf_lab.bench.random_model import random_engine
from looseleaf_lab.bench.results import Row
from looseleaf_lab.bench.timing import Samples, clock_of, measure_in_turn

DocumentNumbers = Sequence[int]
LIMIT = 3.0
"""Limit of the mean first token, as a multiple of an unloaded full recompute."""
PAPER = {"first token alone": "2.2 to 3.3", "highest rate": "2.8 to 5"}
"""Factors over full recompute, from the paper; over MapReduce they are 2 to 5."""
PARTS = ("rates", "sizes")
_RATES = (2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0)
# duration of a rate, in unloaded first tokens
_FIRST_TOKENS = 10


@dataclass(frozen=True)
class RateConfig:
    """A request reads ``per_request`` of ``documents`` and writes ``output`` tokens.

    Each of ``rates`` lasts ten unloaded first tokens, but at least ``hold`` and at most ``longest``
    seconds, and has at least ``arrivals`` requests. A map call writes ``summary`` tokens.
    ``selectors`` recompute a share ``ratio`` of the documents. Each of ``batches`` is a number of
    requests that arrive together."""

    shape: str = "llama-3.1-8b"
    device: str = "cuda"
    documents: int = 40
    document_tokens: int = 512
    per_request: int = 6
    question: int = 32
    output: int = 8
    summary: int = 32
    ratio: float = 0.15
    selectors: tuple[str, ...] = ("deviation", "question")
    rates: tuple[float, ...] = _RATES
    arrivals: int = 20
    hold: float = 1.0
    longest: float = 4.0
    batches: tuple[int, ...] = (2, 4, 8)
    repetitions: int = 5

    @property
    def prompt_tokens(self) -> int:
        return self.per_request * self.document_tokens + self.question

    def sizes(self) -> "list[tuple[RateConfig, int]]":
        """Half and twice the documents, half and twice their length, and batches."""
        half_count, half_length = max(1, self.per_request // 2), max(16, self.document_tokens // 2)
        configs = [
            *(replace(self, per_request=n) for n in (half_count, 2 * self.per_request)),
            *(replace(self, document_tokens=n) for n in (half_length, 2 * self.document_tokens)),
        ]
        # a request has distinct documents
        sized = [(c, 1) for c in configs if c.per_request <= c.documents]
        return sized + [(self, batch) for batch in self.batches]

    def num_arrivals(self, rate: float, unloaded: float = 0.0) -> int:
        """Number of requests at a rate whose unloaded first tokens take ``unloaded`` seconds: long
        enough for a queue to grow."""
        duration = max(self.hold, min(_FIRST_TOKENS * unloaded, self.longest))
        return max(self.arrivals, round(rate * duration))

    def policies(self) -> dict[str, Fuse]:
        """The fuse policies by arm. Raises InvalidOption for an unknown selector, or for one
        without a ratio."""
        return {
            f"{name}, ratio {self.ratio:g}": Fuse(name, ratio=self.ratio)  # type: ignore[arg-type]
            for name in self.selectors
        }


def small(device: str) -> RateConfig:
    """Sizes for a CPU: the reference model's shape."""
    sizes = RateConfig("small", device)
    return replace(sizes, documents=12, document_tokens=128, summary=16)


class Service:
    """One engine and its documents."""

    def __init__(self, config: RateConfig) -> None:
        # twice each size, for the larger variants of `sizes`
        room = 2 * (config.prompt_tokens + config.output + 32 * (config.per_request + 2))
        tokens = 2 * config.documents * (config.document_tokens + 16)
        tokens += max(config.arrivals, *config.batches) * room
        settings = EngineConfig(
            device=config.device,
            max_model_len=room + config.per_request * config.summary,
            cache=CacheConfig(num_pages=-(-tokens // 16)),
        )
        self.engine: Engine = random_engine(config.shape, settings, torch.device(config.device))
        # without it, requests would wait for kernels to compile
        self.engine.runner.warm_up()
        self.clock = clock_of(self.engine.runner.model.device.type)[1]
        self._random = random.Random(0)
        self._vocabulary = range(2, self.engine.runner.model.config.vocab_size)
        self._names = count()
        self.resize(config)

    def resize(self, config: RateConfig) -> None:
        """Replace the documents by new ones of other sizes."""
        self.config = config
        self.texts = [self.tokens(config.document_tokens) for _ in range(config.documents)]

    def tokens(self, length: int) -> tuple[int, ...]:
        """New random tokens."""
        return tuple(self._random.choices(self._vocabulary, k=length))

    def draw(self) -> list[int]:
        """The documents of a request, in its order."""
        return self._random.sample(range(self.config.documents), self.config.per_request)

    def add(self, prompt: PromptParts, output: int, fuse: Fuse | None = None) -> RequestProgress:
        """A request with ``output`` tokens of answer, not started."""
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        return self.engine.add(Request(f"rate-{next(self._names)}", prompt, params, fuse=fuse))

    def finish(self) -> None:
        while self.engine.has_work:
            self.engine.step()

    def question(self) -> TextPart:
        return TextPart(self.tokens(self.config.question))

    def uncached_text(self, numbers: DocumentNumbers) -> PromptParts:
        """The documents as text with a new beginning, so no prefix is cached."""
        text = tuple(token for n in numbers for token in self.texts[n])
        return (TextPart((*self.tokens(16), *text[16:], *self.question().tokens)),)

    def cached_text(self, numbers: DocumentNumbers) -> PromptParts:
        """The documents as text; the first one may be a cached prefix."""
        text = tuple(token for n in numbers for token in self.texts[n])
        return (TextPart((*text, *self.question().tokens)),)

    def as_documents(self, numbers: DocumentNumbers) -> PromptParts:
        """The documents as segments."""
        return (*(DocumentPart(self.texts[n], 0, "document") for n in numbers), self.question())


@dataclass(frozen=True)
class Arm:
    """A kind of prompt, the prompts that are cached before it, and a fuse policy.

    ``keeps_cache``: requests evict nothing that the arm needs cached."""

    make_prompt: Callable[[DocumentNumbers], PromptParts]
    cached: Callable[[DocumentNumbers], PromptParts] | None = None
    fuse: Fuse | None = None
    keeps_cache: bool = False


def arms_of(service: Service) -> dict[str, Arm]:
    """All arms; full recompute is the first."""
    reuse = Arm(service.as_documents, service.as_documents, keeps_cache=True)
    return {
        "full recompute": Arm(service.uncached_text),
        "prefix caching": Arm(service.cached_text, service.cached_text),
        "reuse": reuse,
        **{name: replace(reuse, fuse=fuse) for name, fuse in service.config.policies().items()},
    }


def fill(service: Service, arm: Arm, numbers: DocumentNumbers) -> None:
    """Cache these documents in the form the arm needs, and nothing else."""
    service.engine.store.evict_idle()
    if arm.cached is not None:
        for number in numbers:
            service.add(arm.cached([number]), 1)
        service.finish()


def measure(
    config: RateConfig, parts: Sequence[str] = PARTS, progress: Progress = SILENT
) -> Iterator[Row]:
    """Rows of unloaded first tokens; then, for ``parts``, first tokens at rising rates with the
    highest rate of each arm, and first tokens for other sizes."""
    progress.stage("making the model")
    service = Service(config)
    arms = arms_of(service)
    timed = {name: partial(_batch_wait, service, arm, 1) for name, arm in arms.items()}
    map_arms = {
        "map-reduce": partial(_map_seconds, service, reduced=True),
        "map-rerank": partial(_map_seconds, service, reduced=False),
    }
    progress.stage("first tokens alone")
    samples = measure_in_turn(timed | map_arms, config.repetitions, progress=progress)
    yield from _compared(config, "first token alone", samples)
    full = statistics.fmean(samples["full recompute"].values)
    if "rates" in parts:
        yield from _rising(service, arms, full, progress)
    sizes = config.sizes() if "sizes" in parts else ()
    for sized, batch in progress.over(sizes, _size_name):
        service.resize(sized)
        timed = {name: partial(_batch_wait, service, arm, batch) for name, arm in arms.items()}
        samples = measure_in_turn(timed, config.repetitions, progress=progress)
        label = "first token alone" if batch == 1 else f"first token, {batch} at once"
        yield from _compared(sized, label, samples)
        service.engine.check()


def _size_name(size: tuple[RateConfig, int]) -> str:
    config, batch = size
    return f"{config.per_request} documents of {config.document_tokens}, {batch} at once"


def _compared(config: RateConfig, label: str, samples: dict[str, Samples]) -> Iterator[Row]:
    full = statistics.fmean(samples["full recompute"].values)
    for name, seconds in samples.items():
        yield _row(config, (label, name), seconds, full / statistics.fmean(seconds.values))


def _rising(
    service: Service, arms: dict[str, Arm], full: float, progress: Progress
) -> Iterator[Row]:
    """First tokens at rising rates, and the highest sustained rate of each arm.

    ``full`` is an unloaded full recompute (s)."""
    config, highest = service.config, dict[str, float]()
    for name, arm in progress.over(arms.items(), lambda arm: f"rising rates, {arm[0]}"):
        # this fill also captures graphs and compiles kernels
        fill(service, arm, range(config.documents))
        unloaded = min(_first_tokens(service, arm, 1 / full).values)
        highest[name] = 0.0
        for rate in progress.over(config.rates, lambda rate: f"{rate:g} requests/s"):
            if not arm.keeps_cache:
                fill(service, arm, range(config.documents))
            waits = _first_tokens(service, arm, rate, unloaded)
            mean = statistics.fmean(waits.values)
            yield _row(config, ("first token", name), waits, full / mean, rate)
            if mean > LIMIT * full:
                break
            highest[name] = rate
        service.engine.check()
    for name, rate in highest.items():
        ratio = rate / highest["full recompute"] if highest["full recompute"] else ""
        yield _row(config, ("highest rate", name), Samples((rate,)), ratio)


def _batch_wait(service: Service, arm: Arm, batch: int) -> float:
    """Mean wait for the first tokens of a batch on an idle engine (s)."""
    orders = [service.draw() for _ in range(batch)]
    fill(service, arm, sorted({number for numbers in orders for number in numbers}))
    prompts = [arm.make_prompt(numbers) for numbers in orders]
    waits = serve(
        service.engine,
        service.clock,
        lambda number: service.add(prompts[number], 1, arm.fuse),
        [0.0] * batch,
    )
    return statistics.fmean(wait.first for wait in waits)


def _map_seconds(service: Service, *, reduced: bool) -> float:
    """Seconds to the first token of an answer from one call per document, with an empty cache."""
    config = service.config
    service.engine.store.evict_idle()
    numbers, question = service.draw(), service.question()
    prompts = [(TextPart((*service.texts[n], *question.tokens)),) for n in numbers]
    notes = TextPart((*service.tokens(len(numbers) * config.summary), *question.tokens))
    start = service.clock()
    for prompt in prompts:
        service.add(prompt, config.summary)
    service.finish()
    if reduced:
        service.add((notes,), 1)
        service.finish()
    return service.clock() - start


def _first_tokens(service: Service, arm: Arm, rate: float, unloaded: float = 0.0) -> Samples:
    """Waits for first tokens at ``rate`` requests/s; `num_arrivals` sets their number."""
    config = service.config
    prompts = [arm.make_prompt(service.draw()) for _ in range(config.num_arrivals(rate, unloaded))]
    waits = serve(
        service.engine,
        service.clock,
        lambda number: service.add(prompts[number], config.output, arm.fuse),
        poisson_arrivals(rate, len(prompts)),
    )
    return Samples(tuple(wait.first for wait in waits))


def _row(
    config: RateConfig,
    label: tuple[str, str],
    samples: Samples,
    times_full: float | str,
    rate: float | str = "",
) -> Row:
    measurement, arm = label
    is_rate = measurement == "highest rate"
    scale = 1.0 if is_rate else 1e3
    ordered = sorted(scale * value for value in samples.values)
    return {
        "model": f"{config.shape}, random",
        "measurement": measurement,
        "documents": config.documents,
        "document_tokens": config.document_tokens,
        "per_request": config.per_request,
        "output": config.output,
        "arm": arm,
        "rate": rate,
        "unit": "requests/s" if is_rate else "ms",
        "clock": clock_of(torch.device(config.device).type)[0],
        "value": statistics.fmean(ordered),
        "median": statistics.median(ordered),
        "p95": ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))],
        "requests": len(ordered),
        "times_full": times_full,
        "paper": PAPER.get(measurement, "") if arm in config.policies() else "",
    }

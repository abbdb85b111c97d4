"""``bench rate``: first tokens while requests arrive, by what is computed of their documents; what
CacheBlend (arXiv 2405.16444) claims about throughput.

Every request takes some of a world's documents in an order of its own, and a question. Arms: the
whole prompt as text (full recompute), text that begins as one before it did (prefix caching), plain
reuse, and reuse with a share of the tokens computed again. Rates rise until a first token takes
more than `LIMIT` times what it takes a full recompute alone. First tokens alone are measured for
other numbers and lengths of documents too, and of several requests at once; MapReduce and
MapRerank ask about each document by itself. Random weights and tokens: times, never quality."""

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
from looseleaf_lab.bench.arrivals import arrive_at_random, serve
from looseleaf_lab.bench.progress import SILENT, Progress
from looseleaf_lab.bench.random_model import random_engine
from looseleaf_lab.bench.results import Row
from looseleaf_lab.bench.timing import Repeated, clock_of, measure_in_turn

Chosen = Sequence[int]
LIMIT = 3.0
"""Past so many times a full recompute alone, a first token comes too late."""
PAPER = {"first token alone": "2.2 to 3.3", "highest rate": "2.8 to 5"}
"""How many times sooner, or more, than full recompute; 2 to 5 times sooner than MapReduce."""
PARTS = ("rates", "sizes")
_RATES = (2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0)
# so many first tokens' time a rate is held
_FIRST_TOKENS = 10


@dataclass(frozen=True)
class RateConfig:
    """A request takes ``per_request`` of ``documents``. Each of ``rates`` is held for ten times
    what a first token takes alone, ``hold`` seconds at least and ``longest`` at most, and for
    ``arrivals`` requests at least, answers of ``output`` tokens. A map call writes
    ``summary`` tokens. Documents are computed again by ``selectors`` at ``ratio``. ``batches`` come
    at once."""

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
        """Half and twice the documents, half and twice their length, and several at once."""
        few, short = max(1, self.per_request // 2), max(16, self.document_tokens // 2)
        others = [
            *(replace(self, per_request=n) for n in (few, 2 * self.per_request)),
            *(replace(self, document_tokens=n) for n in (short, 2 * self.document_tokens)),
        ]
        # no request takes a document twice
        alone = [(c, 1) for c in others if c.per_request <= c.documents]
        return alone + [(self, batch) for batch in self.batches]

    def arriving(self, rate: float, alone: float = 0.0) -> int:
        """How many requests arrive at a rate, whose first tokens take ``alone`` seconds when nobody
        else is there: a queue must have the time to grow."""
        held = max(self.hold, min(_FIRST_TOKENS * alone, self.longest))
        return max(self.arrivals, round(rate * held))

    def policies(self) -> dict[str, Fuse]:
        """The fuse policies by the names of their arms. Raises InvalidOption for a selector that
        takes no ratio, or is none."""
        return {
            f"{name}, ratio {self.ratio:g}": Fuse(name, ratio=self.ratio)  # type: ignore[arg-type]
            for name in self.selectors
        }


def small(device: str) -> RateConfig:
    """Sizes for a processor: the reference model's shape."""
    sizes = RateConfig("small", device)
    return replace(sizes, documents=12, document_tokens=128, summary=16)


class Service:
    """One engine and its documents; ``ask`` adds a request."""

    def __init__(self, config: RateConfig) -> None:
        # twice of everything, for other sizes
        room = 2 * (config.prompt_tokens + config.output + 32 * (config.per_request + 2))
        tokens = 2 * config.documents * (config.document_tokens + 16)
        tokens += max(config.arrivals, *config.batches) * room
        settings = EngineConfig(
            device=config.device,
            max_model_len=room + config.per_request * config.summary,
            cache=CacheConfig(num_pages=-(-tokens // 16)),
        )
        self.engine: Engine = random_engine(config.shape, settings, torch.device(config.device))
        # as a server does: a kernel that is compiled among requests is all that they wait for
        self.engine.runner.warm_up()
        self.clock = clock_of(self.engine.runner.model.device.type)[1]
        self._random = random.Random(0)
        self._vocabulary = range(2, self.engine.runner.model.config.vocab_size)
        self._names = count()
        self.turn_to(config)

    def turn_to(self, config: RateConfig) -> None:
        """Go on with new documents of other sizes."""
        self.config = config
        self.texts = [self.tokens(config.document_tokens) for _ in range(config.documents)]

    def tokens(self, length: int) -> tuple[int, ...]:
        """Tokens that nobody has seen."""
        return tuple(self._random.choices(self._vocabulary, k=length))

    def draw(self) -> list[int]:
        """The documents of a request, in its order."""
        return self._random.sample(range(self.config.documents), self.config.per_request)

    def add(self, prompt: PromptParts, output: int, fuse: Fuse | None = None) -> RequestProgress:
        """A request with so many tokens of answer, not yet begun."""
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        return self.engine.add(Request(f"rate-{next(self._names)}", prompt, params, fuse=fuse))

    def finish(self) -> None:
        while self.engine.has_work:
            self.engine.step()

    def question(self) -> TextPart:
        return TextPart(self.tokens(self.config.question))

    def unseen(self, chosen: Chosen) -> PromptParts:
        """The documents as text whose first token nobody has begun with."""
        text = tuple(token for n in chosen for token in self.texts[n])
        return (TextPart((*self.tokens(16), *text[16:], *self.question().tokens)),)

    def text(self, chosen: Chosen) -> PromptParts:
        """The documents as text, whose first one is cached."""
        text = tuple(token for n in chosen for token in self.texts[n])
        return (TextPart((*text, *self.question().tokens)),)

    def parts(self, chosen: Chosen) -> PromptParts:
        """The documents as such."""
        return (*(DocumentPart(self.texts[n], 0, "document") for n in chosen), self.question())


@dataclass(frozen=True)
class Arm:
    """How prompts are made, what is in the cache before, and the policy of requests. ``stays``:
    requests leave in the cache what was there."""

    make: Callable[[Chosen], PromptParts]
    cached: Callable[[Chosen], PromptParts] | None = None
    fuse: Fuse | None = None
    stays: bool = False


def arms_of(service: Service) -> dict[str, Arm]:
    """All arms, full recompute first."""
    reuse = Arm(service.parts, service.parts, stays=True)
    return {
        "full recompute": Arm(service.unseen),
        "prefix caching": Arm(service.text, service.text),
        "reuse": reuse,
        **{name: replace(reuse, fuse=fuse) for name, fuse in service.config.policies().items()},
    }


def fill(service: Service, arm: Arm, numbers: Chosen) -> None:
    """These documents in the cache as the arm finds them, and nothing else."""
    service.engine.store.evict_idle()
    if arm.cached is not None:
        for number in numbers:
            service.add(arm.cached([number]), 1)
        service.finish()


def measure(
    config: RateConfig, parts: Sequence[str] = PARTS, progress: Progress = SILENT
) -> Iterator[Row]:
    """First tokens alone; then, as ``parts`` say, for every arm first tokens at rising rates and
    the highest rate that was kept up with, and first tokens for other sizes."""
    progress.stage("making the model")
    service = Service(config)
    arms = arms_of(service)
    timed = {name: partial(_at_once, service, arm, 1) for name, arm in arms.items()}
    mapped = {
        "map-reduce": partial(_mapped, service, reduced=True),
        "map-rerank": partial(_mapped, service, reduced=False),
    }
    progress.stage("first tokens alone")
    taken = measure_in_turn(timed | mapped, config.repetitions, progress=progress)
    yield from _compared(config, "first token alone", taken)
    full = statistics.fmean(taken["full recompute"].values)
    if "rates" in parts:
        yield from _rising(service, arms, full, progress)
    sizes = config.sizes() if "sizes" in parts else ()
    for sized, batch in progress.over(sizes, _size_name):
        service.turn_to(sized)
        timed = {name: partial(_at_once, service, arm, batch) for name, arm in arms.items()}
        taken = measure_in_turn(timed, config.repetitions, progress=progress)
        label = "first token alone" if batch == 1 else f"first token, {batch} at once"
        yield from _compared(sized, label, taken)
        service.engine.check()


def _size_name(size: tuple[RateConfig, int]) -> str:
    config, batch = size
    return f"{config.per_request} documents of {config.document_tokens}, {batch} at once"


def _compared(config: RateConfig, label: str, taken: dict[str, Repeated]) -> Iterator[Row]:
    full = statistics.fmean(taken["full recompute"].values)
    for name, seconds in taken.items():
        yield _row(config, (label, name), seconds, full / statistics.fmean(seconds.values))


def _rising(
    service: Service, arms: dict[str, Arm], full: float, progress: Progress
) -> Iterator[Row]:
    """First tokens at rising rates, and the highest that each arm keeps up with; ``full`` is what a
    first token takes a full recompute alone."""
    config, highest = service.config, dict[str, float]()
    for name, arm in progress.over(arms.items(), lambda arm: f"rising rates, {arm[0]}"):
        # what is captured and compiled once is then there
        fill(service, arm, range(config.documents))
        alone = min(_first_tokens(service, arm, 1 / full).values)
        highest[name] = 0.0
        for rate in progress.over(config.rates, lambda rate: f"{rate:g} requests/s"):
            if not arm.stays:
                fill(service, arm, range(config.documents))
            waited = _first_tokens(service, arm, rate, alone)
            mean = statistics.fmean(waited.values)
            yield _row(config, ("first token", name), waited, full / mean, rate)
            if mean > LIMIT * full:
                break
            highest[name] = rate
        service.engine.check()
    for name, rate in highest.items():
        more = rate / highest["full recompute"] if highest["full recompute"] else ""
        yield _row(config, ("highest rate", name), Repeated((rate,)), more)


def _at_once(service: Service, arm: Arm, batch: int) -> float:
    """Mean seconds to the first tokens of requests that come at once, when nobody else is there."""
    drawn = [service.draw() for _ in range(batch)]
    fill(service, arm, sorted({number for chosen in drawn for number in chosen}))
    prompts = [arm.make(chosen) for chosen in drawn]
    waited = serve(
        service.engine,
        service.clock,
        lambda number: service.add(prompts[number], 1, arm.fuse),
        [0.0] * batch,
    )
    return statistics.fmean(one.first for one in waited)


def _mapped(service: Service, *, reduced: bool) -> float:
    """Seconds to the first token of an answer that is made of one about each document; nothing is
    cached."""
    config = service.config
    service.engine.store.evict_idle()
    chosen, question = service.draw(), service.question()
    prompts = [(TextPart((*service.texts[n], *question.tokens)),) for n in chosen]
    notes = TextPart((*service.tokens(len(chosen) * config.summary), *question.tokens))
    begun = service.clock()
    for prompt in prompts:
        service.add(prompt, config.summary)
    service.finish()
    if reduced:
        service.add((notes,), 1)
        service.finish()
    return service.clock() - begun


def _first_tokens(service: Service, arm: Arm, rate: float, alone: float = 0.0) -> Repeated:
    """What requests wait for their first token when so many a second arrive, see `arriving`."""
    config = service.config
    prompts = [arm.make(service.draw()) for _ in range(config.arriving(rate, alone))]
    waited = serve(
        service.engine,
        service.clock,
        lambda number: service.add(prompts[number], config.output, arm.fuse),
        arrive_at_random(rate, len(prompts)),
    )
    return Repeated(tuple(one.first for one in waited))


def _row(
    config: RateConfig,
    what: tuple[str, str],
    taken: Repeated,
    times_full: float | str,
    rate: float | str = "",
) -> Row:
    measurement, arm = what
    is_rate = measurement == "highest rate"
    scale = 1.0 if is_rate else 1e3
    ordered = sorted(scale * value for value in taken.values)
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

"""``bench lazy``: first tokens and throughput when documents are stored once for all positions, the
claims of LazyAttention (arXiv 2606.04302) about time, against copies per position (as
Block-Attention is served) and prefix caching, in one engine with one pool.

Random weights and tokens: for speed only. A copy per position is a document whose first token names
the position, so it has a key of its own and costs what the document costs."""

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
from looseleaf_lab.bench.timing import Repeated, clock_of

PAPER = {("first token", 2.1): 1.37, ("throughput", 2.1): 1.40}
"""How many times faster than copies per position, at Zipf's exponent 2.1; equal at uniform traffic.
Tulu3-Block-FT 8B, H100."""
_SPECIAL = 64  # token ids below it name positions


@dataclass(frozen=True)
class LazyConfig:
    """``documents`` of ``document_tokens``, of which a request takes ``per_request``; the pool
    holds ``capacity`` of them beside what one request needs. The first ``skipped`` requests fill
    it; of the others half are asked one after the other, half at once."""

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
    """Sizes for a processor: the reference model's shape, documents of a page."""
    return replace(
        LazyConfig("small", device),
        documents=30,
        document_tokens=128,
        capacity=8,
        requests=50,
        skipped=15,
        breakdown_tokens=256,
    )


class Desk:
    """One engine and the documents of a world."""

    def __init__(self, config: LazyConfig, tokens: int, capacity: int) -> None:
        self.config = config
        longest = config.per_request * tokens + config.question + config.output + 64
        page = 16
        running = -(-longest // page) + 2 * config.per_request + 8
        pages = capacity * -(-tokens // page) + running
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

    def ask(self, prompt: PromptParts, output: int) -> RequestProgress:
        """A request, not yet begun."""
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        return self.engine.add(Request(f"lazy-{next(self._names)}", prompt, params))

    def finish(self) -> None:
        while self.engine.has_work:
            self.engine.step()

    def once(self, chosen: Sequence[int]) -> PromptParts:
        """Documents that are stored once."""
        parts = [DocumentPart(self.texts[n], 0, f"document {n}") for n in chosen]
        return (*parts, self._question())

    def copies(self, chosen: Sequence[int]) -> PromptParts:
        """Documents with a copy for each place."""
        placed = [(at, *self.texts[n][1:]) for at, n in enumerate(chosen)]
        parts = [DocumentPart(tokens, 0, "document") for tokens in placed]
        return (*parts, self._question())

    def prefix(self, chosen: Sequence[int]) -> PromptParts:
        """Plain text; what begins as a prompt before it is cached."""
        tokens = tuple(token for n in chosen for token in self.texts[n])
        return (TextPart(tokens + self._question().tokens),)


def draw(config: LazyConfig, alpha: float) -> list[list[int]]:
    """The documents of each request: by popularity, in random order; ``alpha`` 0 is uniform."""
    rng = random.Random(f"lazy {alpha}")
    drawn = by_popularity(rng, config.documents, config.per_request, alpha)
    return list(islice(drawn, config.requests))


def measure(config: LazyConfig, progress: Progress = SILENT) -> Iterator[Row]:
    """Rows as they are measured: first tokens and throughput for each skew, then the breakdown."""
    desk = Desk(config, config.document_tokens, config.capacity)
    # what is compiled and captured on first use is then there
    progress.stage("warm-up")
    _throughput(desk, [desk.once(chosen) for chosen in draw(config, config.alphas[0])])
    parts = [*config.alphas, None]
    for alpha in progress.over(parts, lambda a: "breakdown" if a is None else f"alpha {a}"):
        if alpha is None:
            yield from _breakdown(config, progress)
        else:
            yield from _traffic(desk, alpha, progress)


def _traffic(desk: Desk, alpha: float, progress: Progress) -> Iterator[Row]:
    """Every arm in turn: the first requests at once, which fill the pool; half of the others one
    after the other, the rest at once."""
    config, drawn = desk.config, draw(desk.config, alpha)
    middle = (config.skipped + config.requests) // 2
    arms: dict[str, Callable[[Sequence[int]], PromptParts]] = {
        "once": desk.once, "copies per position": desk.copies, "prefix caching": desk.prefix,
    }  # fmt: skip
    once: tuple[float, float] | None = None
    for name, make in progress.over(arms.items(), lambda arm: arm[0]):
        desk.engine.store.evict_idle()
        prompts = [make(chosen) for chosen in drawn]
        _throughput(desk, prompts[: config.skipped])
        alone = Repeated(
            tuple(
                1e3 * _first_token(desk, prompt)
                for prompt in progress.over(
                    prompts[config.skipped : middle], lambda prompt: "a first token"
                )
            )
        )
        mean, rate = statistics.fmean(alone.values), _throughput(desk, prompts[middle:])
        desk.engine.check()
        once = once or (mean, rate)
        yield _row(config, ("first token", "ms, mean"), alpha, name, alone, mean, mean / once[0])
        label = ("throughput", "requests/s")
        yield _row(config, label, alpha, name, Repeated((rate,)), rate, once[1] / rate)


def _first_token(desk: Desk, prompt: PromptParts) -> float:
    start = desk.clock()
    desk.ask(prompt, 1)
    desk.finish()
    return desk.clock() - start


def _throughput(desk: Desk, prompts: Sequence[PromptParts]) -> float:
    gc.collect()
    start = desk.clock()
    for prompt in prompts:
        desk.ask(prompt, desk.config.output)
    desk.finish()
    return len(prompts) / (desk.clock() - start)


def _breakdown(config: LazyConfig, progress: Progress) -> Iterator[Row]:
    """Five documents and a question: none, three and all of them cached. Documents and question
    share a step where they fit one, so what documents cost is the difference between the lines."""
    desk = Desk(config, config.breakdown_tokens, capacity=0)
    whole = list(range(config.per_request))
    cases: tuple[tuple[str, list[int]], ...] = (
        ("none cached", []),
        ("3 cached", whole[:3]),
        ("all cached", whole),
    )
    for name, cached in progress.over(cases, lambda case: case[0]):
        first, token = [], []
        for turn in range(config.repetitions + 1):
            desk.engine.store.evict_idle()
            for number in cached:
                desk.ask(desk.once([number]), 1)
                desk.finish()
            seconds = _stages(desk, desk.once(whole))
            if turn:
                first.append(1e3 * seconds[0])
                token.append(1e3 * seconds[1])
        for stage, taken in (("first token", first), ("a token of output", token)):
            figures = Repeated(tuple(taken))
            label = (f"breakdown, {name}: {stage}", "ms")
            yield _row(config, label, 0.0, "once", figures, figures.median, 1.0)


def _stages(desk: Desk, prompt: PromptParts) -> tuple[float, float]:
    """Seconds to the first token, and for each token after it."""
    gc.collect()
    start = desk.clock()
    progress = desk.ask(prompt, desk.config.output)
    first = 0.0
    while desk.engine.has_work:
        desk.engine.step()
        if not first and progress.metrics.first_token is not None:
            first = desk.clock() - start
    end = desk.clock() - start
    return first, (end - first) / (desk.config.output - 1)


def _row(
    config: LazyConfig,
    what: tuple[str, str],
    alpha: float,
    arm: str,
    taken: Repeated,
    value: float,
    once_faster: float,
) -> Row:
    label, unit = what
    broken_down = label.startswith("breakdown")
    return {
        "model": f"{config.shape}, random",
        "measurement": label,
        "alpha": "" if broken_down else alpha,
        "documents": config.documents,
        "document_tokens": config.breakdown_tokens if broken_down else config.document_tokens,
        "per_request": config.per_request,
        "capacity": config.capacity,
        "requests": len(taken.values),
        "arm": arm,
        "unit": unit,
        "clock": clock_of(torch.device(config.device).type)[0],
        "value": value,
        "low": taken.range[0],
        "high": taken.range[1],
        "once_faster": once_faster,
        "paper": PAPER.get((label, alpha), "") if arm == "copies per position" else "",
    }

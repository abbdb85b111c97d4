"""``bench fuse``: the first token after documents, by fuse policy and by storage tier.

Weights and tokens are random: the figures are times, never quality. The arms are full recompute of
the prompt as new text, prefix caching of its first document, plain reuse, and reuse with recomputed
tokens. Documents are in the pool (``device``), in host memory, or on a disk without page cache.
``load`` is the time of loading alone. Cells alternate; each has a new order of documents and a new
question. The time until a request's first launch is host work alone."""

import gc
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch

from looseleaf.config import CacheConfig, EngineConfig, Fuse, SchedulerConfig, TierConfig
from looseleaf.engine.engine import Engine
from looseleaf.engine.progress import RequestProgress
from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.engine.tiering.compute_time import ComputeTime
from looseleaf.errors import InvalidOption
from looseleaf.kv.keys import SegmentKey
from looseleaf.prompt.request import DocumentPart, PromptParts, Request, TextPart
from looseleaf.sampling_params import SamplingParams
from looseleaf.tiers import DiskTier
from looseleaf_lab.bench.model_shapes import model_shape
from looseleaf_lab.bench.progress import SILENT, Progress
from looseleaf_lab.bench.random_model import random_engine
from looseleaf_lab.bench.results import Row

PLACES = ("device", "host", "disk")
Prompt = tuple[list[DocumentPart], TextPart]


class Arm(NamedTuple):
    """An arm and its share of recomputed tokens (0 without recompute)."""

    name: str
    ratio: float = 0.0


class Cell(NamedTuple):
    """An arm and the storage of its documents."""

    arm: Arm
    place: str


_FULL, _PREFIX = Cell(Arm("full"), "nowhere"), Cell(Arm("prefix"), "device")


@dataclass(frozen=True)
class FuseBench:
    """``documents`` of ``document_tokens`` each and a question, stored in each of ``places``.

    Selectors with a ratio have an arm for each of ``ratios``. The sustained load has ``batches`` of
    ``batch`` requests; each reads ``documents`` of ``stored`` in a random order. The pool has room
    for about ``pool_prompts`` whole prompts."""

    shape: str
    device: torch.device
    folder: Path
    documents: int = 5
    document_tokens: int = 4096
    question: int = 64
    ratios: tuple[float, ...] = (0.15,)
    places: tuple[str, ...] = PLACES
    repetitions: int = 5
    stored: int = 14
    batch: int = 2
    batches: int = 22
    pool_prompts: float = 3.2
    step_tokens: int = 32_768
    selectors: tuple[str, ...] = ("first", "random", "deviation", "question", "links")

    def __post_init__(self) -> None:
        model_shape(self.shape)
        if unknown := set(self.places) - set(PLACES):
            raise InvalidOption(f"unknown place {unknown.pop()!r}: use {', '.join(PLACES)}")

    @property
    def prompt_tokens(self) -> int:
        return self.documents * self.document_tokens + self.question

    def policies(self) -> dict[Arm, Fuse | None]:
        """The policies by arm. Raises InvalidOption for a selector without an arm."""
        layer = min(1, model_shape(self.shape).num_layers - 1)
        policies: dict[Arm, Fuse] = {Arm("first"): Fuse("first", tokens=16)}
        for ratio in self.ratios:
            policies |= {
                Arm("random", ratio): Fuse("random", ratio=ratio),
                Arm("deviation", ratio): Fuse("deviation", ratio=ratio, check_layers=(layer,)),
                Arm("question", ratio): Fuse("question", ratio=ratio),
                Arm("links", ratio): Fuse("links", ratio=ratio),
            }
        if unknown := set(self.selectors) - {arm.name for arm in policies}:
            arms = dict.fromkeys(arm.name for arm in policies)
            raise InvalidOption(f"no arm for {unknown.pop()!r}: the arms are {', '.join(arms)}")
        selected = [arm for name in self.selectors for arm in policies if arm.name == name]
        return {Arm("reuse"): None} | {arm: policies[arm] for arm in selected}


class _Timing(NamedTuple):
    """Seconds until the first token, and until the first launch (0 without a request)."""

    seconds: float
    launch: float = 0.0
    output: RequestOutput | None = None


@dataclass(eq=False)
class _Bench:
    """One warm engine with its documents and tiers."""

    config: FuseBench
    engine: Engine
    corpus: list[DocumentPart] = field(default_factory=list)
    _random: random.Random = field(default_factory=lambda: random.Random(0))
    _names: Iterator[int] = field(default_factory=count)

    @classmethod
    def create(cls, config: FuseBench) -> "_Bench":
        shape, page = model_shape(config.shape), 16
        per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
        per_token *= getattr(torch, shape.torch_dtype).itemsize
        gib = config.stored * (config.document_tokens + page) * per_token / (1 << 30)
        tiers = TierConfig(
            host_gib=1.05 * gib,
            disk_path=str(config.folder) if "disk" in config.places else None,
            disk_gib=1.2 * gib + 0.1,
            tier_timeout=60.0,
        )
        pages = int(config.pool_prompts * (config.prompt_tokens + page * config.documents)) // page
        engine = random_engine(
            config.shape,
            EngineConfig(
                device=str(config.device),
                max_model_len=2 * config.prompt_tokens,
                cache=CacheConfig(num_pages=pages),
                scheduler=SchedulerConfig(max_num_batched_tokens=config.step_tokens),
                tiers=tiers,
            ),
            config.device,
        )
        engine.runner.warm_up()
        # without a measured compute time, the controller always loads
        controller = engine.tiering.controller
        assert controller is not None
        controller.compute_time = ComputeTime()
        bench = cls(config, engine)
        bench.corpus = [bench._document(n) for n in range(config.stored)]
        for document in bench.corpus:
            bench.load([document])
        assert engine.tiers is not None
        engine.tiers.flush(120.0)
        return bench

    def prompt(self) -> Prompt:
        """All prompt documents in a random order, and a new question."""
        number = self.config.documents
        return self._random.sample(self.corpus[:number], number), self._text(self.config.question)

    def load(self, documents: Sequence[DocumentPart]) -> float:
        """Seconds until the documents are in the pool, from any tier."""
        start = time.perf_counter()
        self.engine.warm((*documents, TextPart(())))
        while self.engine.has_work:
            self.engine.step()
        self._wait()
        return time.perf_counter() - start

    def prepare(self, place: str, documents: Sequence[DocumentPart]) -> None:
        """Move documents to ``place`` and out of every faster tier."""
        engine = self.engine
        assert engine.tiers is not None and engine.tiers.host is not None
        host, keys = engine.tiers.host, [self._key(document) for document in self.corpus]
        engine.tiers.flush(120.0)
        engine.tiering.release_pages()
        engine.store.evict_idle()
        if place == "disk":
            host.delete(keys)
            for guard in engine.tiers.guards:
                if isinstance(guard.tier, DiskTier):
                    for key in keys:
                        guard.tier.drop_page_cache(key)
        elif not all(host.contains(keys)):
            resident = dict(zip(keys, host.contains(keys), strict=True))
            self.load([d for d, key in zip(self.corpus, keys, strict=True) if not resident[key]])
            engine.tiers.flush(120.0)
            engine.tiering.release_pages()
            engine.store.evict_idle()
        if place == "device":
            self.load(documents)
        gc.collect()
        self._wait()

    def answer(self, parts: PromptParts, fuse: Fuse | None = None) -> _Timing:
        """Times from the call, and the answer."""
        launch, start = None, time.perf_counter()
        progress = self._add(parts, fuse)
        while progress.metrics.first_token is None and progress.error is None:
            self.engine.step()
            assert self.engine.last_step is not None
            launch = launch or self.engine.last_step.launched
        seconds = time.perf_counter() - start
        while self.engine.has_work:
            self.engine.step()
        if progress.error is not None:
            raise progress.error
        assert launch is not None, "a token was computed"
        return _Timing(seconds, launch - start, progress.output())

    def answer_all(self, prompts: Sequence[PromptParts], fuse: Fuse | None) -> float:
        """Seconds until all requests have their first token."""
        start = time.perf_counter()
        submitted = [self._add(parts, fuse) for parts in prompts]
        while self.engine.has_work:
            self.engine.step()
        seconds = time.perf_counter() - start
        for progress in submitted:
            if progress.error is not None:
                raise progress.error
        return seconds

    def draw_batch(self) -> list[Prompt]:
        """A batch of prompts with random selections of all documents."""
        number, length = self.config.documents, self.config.question
        return [
            (self._random.sample(self.corpus, number), self._text(length))
            for _ in range(self.config.batch)
        ]

    def _add(self, parts: PromptParts, fuse: Fuse | None) -> RequestProgress:
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        return self.engine.add(Request(f"fuse-{next(self._names)}", parts, params, fuse=fuse))

    def _text(self, length: int) -> TextPart:
        vocab = self.engine.runner.model.config.vocab_size
        return TextPart(tuple(self._random.choices(range(vocab), k=length)))

    def _document(self, number: int) -> DocumentPart:
        return DocumentPart(self._text(self.config.document_tokens).tokens, 0, f"document {number}")

    def _key(self, document: DocumentPart) -> SegmentKey:
        keys = self.engine.documents.keys
        return keys.document(keys.root, document.tokens)

    def _wait(self) -> None:
        if self.config.device.type == "cuda":
            torch.cuda.synchronize(self.config.device)


def as_text(prompt: Prompt) -> PromptParts:
    """A prompt as one text."""
    documents, question = prompt
    tokens = [token for document in documents for token in document.tokens]
    return (TextPart((*tokens, *question.tokens)),)


def as_parts(prompt: Prompt) -> PromptParts:
    """A prompt as documents and a question."""
    documents, question = prompt
    return (*documents, question)


def measure(config: FuseBench, progress: Progress = SILENT) -> Iterator[Row]:
    """A row per arm and place, then the rows of the sustained load."""
    progress.stage("making the model")
    bench = _Bench.create(config)
    try:
        yield from _first_tokens(bench, progress)
        yield from _sustained(bench, progress)
        bench.engine.check()
    finally:
        bench.engine.close()


def _first_tokens(bench: _Bench, progress: Progress) -> Iterator[Row]:
    config, policies = bench.config, bench.config.policies()
    cells = [_FULL, _PREFIX, *(Cell(Arm("load"), p) for p in config.places if p != "device")]
    cells += [Cell(arm, place) for place in config.places for arm in policies]
    timings: dict[Cell, list[_Timing]] = {cell: [] for cell in cells}
    try:
        for number in progress.over(range(config.repetitions + 1), lambda n: f"round {n + 1}"):
            first = number * 5 % len(cells)
            order = [*cells[first:], *cells[:first]]
            for cell in progress.over(order, lambda cell: cell.arm.name):
                timing = _once(bench, cell, policies)
                if number:
                    timings[cell].append(timing)
    finally:
        # an interrupted run still reports its complete rounds
        if all(timings.values()):
            yield from _first_rows(config, timings)


def _first_rows(config: FuseBench, timings: Mapping[Cell, Sequence[_Timing]]) -> Iterator[Row]:
    times = {cell: [t.seconds for t in group] for cell, group in timings.items()}
    medians = {cell: statistics.median(values) for cell, values in times.items()}
    for cell, values in times.items():
        load = medians.get(Cell(Arm("load"), cell.place), 0.0)
        # compute time of the arm alone: the same documents, already in the pool
        compute = medians.get(Cell(cell.arm, "device"), 0.0) if cell.arm.name != "load" else 0.0
        slower, output = max(load, compute) if load and compute else 0.0, timings[cell][-1].output
        yield _row(config, "first token", cell, values, (medians[_FULL], medians[_PREFIX])) | {
            "computed_again": output.reuse.document_tokens_recomputed if output else 0,
            "load_ms": 1e3 * load,
            "compute_ms": 1e3 * compute,
            "over_slower": medians[cell] / slower if slower else 0.0,
        }
    launches = {cell: [t.launch for t in group] for cell, group in timings.items()}
    baselines = statistics.median(launches[_FULL]), statistics.median(launches[_PREFIX])
    for cell, values in launches.items():
        if cell.arm.name != "load":
            yield _row(config, "first launch", cell, values, baselines)


def _once(bench: _Bench, cell: Cell, policies: Mapping[Arm, Fuse | None]) -> _Timing:
    documents, question = prompt = bench.prompt()
    if cell == _FULL:
        bench.prepare("host", documents)
        return bench.answer(as_text(prompt))
    if cell == _PREFIX:
        bench.prepare("host", documents)
        bench.answer((TextPart((*documents[0].tokens, *question.tokens)),))
        return bench.answer(as_text(prompt))
    bench.prepare(cell.place, documents)
    if cell.arm.name == "load":
        return _Timing(bench.load(documents))
    return bench.answer((*documents, question), policies[cell.arm])


def _row(
    config: FuseBench,
    label: str,
    cell: Cell,
    values: Sequence[float],
    baselines: tuple[float, float],
) -> Row:
    """A row of ``values`` (s); ``baselines`` are the medians of full recompute and prefix
    caching."""
    median = statistics.median(values)
    return {
        **_sizes(config),
        "measurement": label,
        "arm": cell.arm.name,
        "place": cell.place,
        "ratio": cell.arm.ratio,
        "computed_again": 0,
        "batch": 0,
        "repetitions": len(values),
        "ms": 1e3 * median,
        "ms_low": 1e3 * min(values),
        "ms_high": 1e3 * max(values),
        "times_full": baselines[0] / median,
        "times_prefix": baselines[1] / median,
        **dict.fromkeys(("load_ms", "compute_ms", "over_slower"), 0.0),
    }


def _sizes(config: FuseBench) -> Row:
    return {
        "model": f"{config.shape}, random",
        "documents": config.documents,
        "document_tokens": config.document_tokens,
        "question_tokens": config.question,
    }


def _sustained(bench: _Bench, progress: Progress) -> Iterator[Row]:
    """Times of successive batches over more documents than fit in the pool.

    ``times_full`` compares with the median batch of full recompute. ``batch`` counts from 0."""
    if not (config := bench.config).batches:
        return
    baseline_batches = max(2, config.batches // 4)
    arms: dict[Arm, tuple[Fuse | None, bool, int]] = {
        _FULL.arm: (None, True, baseline_batches),
        _PREFIX.arm: (None, True, baseline_batches),
        **{arm: (fuse, False, config.batches) for arm, fuse in config.policies().items()},
    }
    seconds: dict[Arm, list[float]] = {}
    for arm, (fuse, text, number) in progress.over(arms.items(), lambda item: item[0].name):
        bench.prepare("host", bench.corpus)
        seconds[arm] = []
        for _ in progress.over(range(number), lambda round_number: f"batch {round_number + 1}"):
            if arm == _FULL.arm:
                bench.engine.store.evict_idle()
            prompts = bench.draw_batch()
            parts = [as_text(p) if text else as_parts(p) for p in prompts]
            seconds[arm].append(bench.answer_all(parts, fuse))
    baselines = statistics.median(seconds[_FULL.arm]), statistics.median(seconds[_PREFIX.arm])
    label = f"batch of {config.batch}, {config.documents} of {config.stored}"
    for arm, timings in seconds.items():
        for number, value in enumerate(timings):
            yield _row(config, label, Cell(arm, "host"), [value], baselines) | {"batch": number}

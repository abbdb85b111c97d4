"""``bench fuse``: the first token behind documents that meet, policy by policy and tier by tier.

Random weights and random tokens: times, never quality. Arms are the prompt as plain text that
nobody has seen (full recompute), the same with its first document found (prefix caching), plain
reuse, and reuse with tokens computed again. Documents stand in the pool (``device``), or must come
from the host's memory or from a disk that has nothing of them in memory. ``load`` is what a place
takes to give the documents and nothing else. Cells are measured in turn, each in a new order of
the documents behind a new question. Until the first launch of a request the host works alone."""

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
from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.engine.tiering.compute_time import ComputePace
from looseleaf.errors import InvalidOption
from looseleaf.kv.keys import SegmentKey
from looseleaf.prompt.request import DocumentPart, PromptParts, Request, TextPart
from looseleaf.sampling_params import SamplingParams
from looseleaf.tiers import DiskTier
from looseleaf_lab.bench.progress import SILENT, Progress
from looseleaf_lab.bench.random_model import model_shape, random_engine
from looseleaf_lab.bench.results import Row

PLACES = ("device", "host", "disk")
Prompt = tuple[list[DocumentPart], TextPart]


class Arm(NamedTuple):
    """A way to answer, and the share that is computed again, 0 where there is none."""

    name: str
    ratio: float = 0.0


class Cell(NamedTuple):
    """An arm, and where the documents are."""

    arm: Arm
    place: str


_FULL, _PREFIX = Cell(Arm("full"), "nowhere"), Cell(Arm("prefix"), "device")


@dataclass(frozen=True)
class FuseBench:
    """``documents`` of ``document_tokens`` each and a question; ``places`` of `PLACES`; every
    selector that takes one has an arm for each of ``ratios``.

    The sustained load has ``batches`` of ``batch`` requests, each with ``documents`` of ``stored``
    in an order of its own; the pool holds about ``pool_prompts`` whole prompts."""

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
        unknown = set(self.places) - set(PLACES)
        if unknown:
            raise InvalidOption(
                f"unknown place {unknown.pop()!r}: documents are on {', '.join(PLACES)}"
            )

    @property
    def prompt_tokens(self) -> int:
        return self.documents * self.document_tokens + self.question

    def policies(self) -> dict[Arm, Fuse | None]:
        """The policies by their arms. Raises InvalidOption for a selector that has none."""
        layer = min(1, model_shape(self.shape).num_layers - 1)
        every: dict[Arm, Fuse] = {Arm("first"): Fuse("first", tokens=16)}
        for ratio in self.ratios:
            every |= {
                Arm("random", ratio): Fuse("random", ratio=ratio),
                Arm("deviation", ratio): Fuse("deviation", ratio=ratio, check_layers=(layer,)),
                Arm("question", ratio): Fuse("question", ratio=ratio),
                Arm("links", ratio): Fuse("links", ratio=ratio),
            }
        unknown = set(self.selectors) - {arm.name for arm in every}
        if unknown:
            known = dict.fromkeys(arm.name for arm in every)
            raise InvalidOption(f"no arm for {unknown.pop()!r}: there are {', '.join(known)}")
        chosen = {arm: every[arm] for name in self.selectors for arm in every if arm.name == name}
        return {Arm("reuse"): None, **chosen}


class _Asked(NamedTuple):
    """Seconds until the first token and until the first launch, 0 if nobody asked for a token."""

    seconds: float
    launch: float = 0.0
    output: RequestOutput | None = None


@dataclass(eq=False)
class _Bench:
    """One engine, warm as a server's is, with its documents and tiers."""

    config: FuseBench
    engine: Engine
    held: list[DocumentPart] = field(default_factory=list)
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
        # documents are always loaded, also where computing them would be quicker
        controller = engine.tiering.controller
        assert controller is not None
        controller.pace = ComputePace()
        bench = cls(config, engine)
        bench.held = [bench._document(n) for n in range(config.stored)]
        for document in bench.held:
            bench.bring([document])
        assert engine.tiers is not None
        engine.tiers.flush(120.0)
        return bench

    def prompt(self) -> Prompt:
        """Some of the documents in a new order, and a new question."""
        chosen = self._random.sample(self.held[: self.config.documents], self.config.documents)
        return chosen, self._text(self.config.question)

    def bring(self, documents: Sequence[DocumentPart]) -> float:
        """Seconds until documents are in the pool, from wherever they are."""
        begun = time.perf_counter()
        self.engine.warm((*documents, TextPart(())))
        while self.engine.has_work:
            self.engine.step()
        self._wait()
        return time.perf_counter() - begun

    def prepare(self, place: str, documents: Sequence[DocumentPart]) -> None:
        """Have documents stand in ``place`` and nowhere above it."""
        engine = self.engine
        assert engine.tiers is not None and engine.tiers.host is not None
        host, keys = engine.tiers.host, [self._key(document) for document in self.held]
        engine.tiers.flush(120.0)
        engine.tiering.release_pages()
        engine.store.evict_idle()
        if place == "disk":
            host.delete(keys)
            for guard in engine.tiers.guards:
                if isinstance(guard.tier, DiskTier):
                    for key in keys:
                        guard.tier.cool(key)
        elif not all(host.contains(keys)):
            there = dict(zip(keys, host.contains(keys), strict=True))
            self.bring([d for d, key in zip(self.held, keys, strict=True) if not there[key]])
            engine.tiers.flush(120.0)
            engine.tiering.release_pages()
            engine.store.evict_idle()
        if place == "device":
            self.bring(documents)
        gc.collect()
        self._wait()

    def ask(self, parts: PromptParts, fuse: Fuse | None = None) -> _Asked:
        """Times from the call on, and the answer."""
        params, launched = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), None
        begun = time.perf_counter()
        progress = self.engine.add(Request(f"fuse-{next(self._names)}", parts, params, fuse=fuse))
        while progress.metrics.first_token is None and progress.error is None:
            self.engine.step()
            assert self.engine.last_step is not None
            launched = launched or self.engine.last_step.launched
        seconds = time.perf_counter() - begun
        while self.engine.has_work:
            self.engine.step()
        if progress.error is not None:
            raise progress.error
        assert launched is not None, "a token was computed"
        return _Asked(seconds, launched - begun, progress.output())

    def answer_all(self, prompts: Sequence[PromptParts], fuse: Fuse | None) -> float:
        """Seconds until all of some requests have their first token."""
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        begun = time.perf_counter()
        added = [
            self.engine.add(Request(f"fuse-{next(self._names)}", parts, params, fuse=fuse))
            for parts in prompts
        ]
        while self.engine.has_work:
            self.engine.step()
        seconds = time.perf_counter() - begun
        for progress in added:
            if progress.error is not None:
                raise progress.error
        return seconds

    def shuffled(self, stored: Sequence[DocumentPart]) -> list[Prompt]:
        """A batch of prompts over ``stored``."""
        number = self.config.documents
        return [
            (self._random.sample(stored, number), self._text(self.config.question))
            for _ in range(self.config.batch)
        ]

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
    """A row for every arm and place, then those of the sustained load."""
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
    taken: dict[Cell, list[_Asked]] = {cell: [] for cell in cells}
    try:
        for turn in progress.over(range(config.repetitions + 1), lambda n: f"round {n + 1}"):
            by = turn * 5 % len(cells)
            for cell in progress.over([*cells[by:], *cells[:by]], lambda cell: cell.arm.name):
                asked = _once(bench, cell, policies)
                if turn:
                    taken[cell].append(asked)
    finally:
        # who interrupts it keeps the turns that were
        if all(taken.values()):
            yield from _first_rows(config, taken)


def _first_rows(config: FuseBench, taken: Mapping[Cell, Sequence[_Asked]]) -> Iterator[Row]:
    times = {cell: [asked.seconds for asked in every] for cell, every in taken.items()}
    middle = {cell: statistics.median(values) for cell, values in times.items()}
    for cell, values in times.items():
        load = middle.get(Cell(Arm("load"), cell.place), 0.0)
        # the same with documents that are there already: what is left when loading takes no time
        compute = middle.get(Cell(cell.arm, "device"), 0.0) if cell.arm.name != "load" else 0.0
        slower, output = max(load, compute) if load and compute else 0.0, taken[cell][-1].output
        yield _row(config, "first token", cell, values, (middle[_FULL], middle[_PREFIX])) | {
            "computed_again": output.reuse.document_tokens_recomputed if output else 0,
            "load_ms": 1e3 * load,
            "compute_ms": 1e3 * compute,
            "over_slower": middle[cell] / slower if slower else 0.0,
        }
    launches = {cell: [asked.launch for asked in every] for cell, every in taken.items()}
    against = statistics.median(launches[_FULL]), statistics.median(launches[_PREFIX])
    for cell, values in launches.items():
        if cell.arm.name != "load":
            yield _row(config, "first launch", cell, values, against)


def _once(bench: _Bench, cell: Cell, policies: Mapping[Arm, Fuse | None]) -> _Asked:
    prompt = bench.prompt()
    documents, question = prompt
    if cell == _FULL:
        bench.prepare("host", documents)
        return bench.ask(as_text(prompt))
    if cell == _PREFIX:
        bench.prepare("host", documents)
        bench.ask((TextPart((*documents[0].tokens, *question.tokens)),))
        return bench.ask(as_text(prompt))
    bench.prepare(cell.place, documents)
    if cell.arm.name == "load":
        return _Asked(bench.bring(documents))
    return bench.ask((*documents, question), policies[cell.arm])


def _row(
    config: FuseBench, what: str, cell: Cell, values: Sequence[float], against: tuple[float, float]
) -> Row:
    """A row of some seconds ``against`` those of full recompute and of prefix caching."""
    middle = statistics.median(values)
    return {
        **_about(config),
        "measurement": what,
        "arm": cell.arm.name,
        "place": cell.place,
        "ratio": cell.arm.ratio,
        "computed_again": 0,
        "batch": 0,
        "repetitions": len(values),
        "ms": 1e3 * middle,
        "ms_low": 1e3 * min(values),
        "ms_high": 1e3 * max(values),
        "times_full": against[0] / middle,
        "times_prefix": against[1] / middle,
        **dict.fromkeys(("load_ms", "compute_ms", "over_slower"), 0.0),
    }


def _about(config: FuseBench) -> Row:
    return {
        "model": f"{config.shape}, random",
        "documents": config.documents,
        "document_tokens": config.document_tokens,
        "question_tokens": config.question,
    }


def _sustained(bench: _Bench, progress: Progress) -> Iterator[Row]:
    """Batch after batch over documents that the pool does not hold all of: does it stay quick?

    ``times_full`` is against the median batch of full recompute, ``batch`` 0 is the first."""
    if not (config := bench.config).batches:
        return
    few = max(2, config.batches // 4)
    arms: dict[Arm, tuple[Fuse | None, bool, int]] = {
        _FULL.arm: (None, True, few),
        _PREFIX.arm: (None, True, few),
        **{arm: (fuse, False, config.batches) for arm, fuse in config.policies().items()},
    }
    seconds: dict[Arm, list[float]] = {}
    for arm, (fuse, text, number) in progress.over(arms.items(), lambda item: item[0].name):
        bench.prepare("host", bench.held)
        seconds[arm] = []
        for _ in progress.over(range(number), lambda turn: f"batch {turn + 1}"):
            if arm == _FULL.arm:
                bench.engine.store.evict_idle()
            prompts = bench.shuffled(bench.held)
            parts = [as_text(p) if text else as_parts(p) for p in prompts]
            seconds[arm].append(bench.answer_all(parts, fuse))
    against = statistics.median(seconds[_FULL.arm]), statistics.median(seconds[_PREFIX.arm])
    what = f"batch of {config.batch}, {config.documents} of {config.stored}"
    for arm, taken in seconds.items():
        for number, value in enumerate(taken):
            yield _row(config, what, Cell(arm, "host"), [value], against) | {"batch": number}

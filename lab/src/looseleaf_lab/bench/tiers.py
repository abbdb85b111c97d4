"""``bench tiers``: the choices of the loading controller against a sweep of ratios on every tier
(after CacheBlend, arXiv 2405.16444, section 5.1).

The same documents are loaded from each tier while a share of their tokens is recomputed
(`Fuse("random")`). The measure is the time until the first token: for shares from small to all, for
computing instead of loading, and for the controller's choice of a share (``balanced``) and of
loading. One more engine has all tiers, and its controller picks one. All arms alternate. The goal
is a controller within 10 % of the best time of the sweep."""

import random
import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from looseleaf.config import Fuse, TierConfig
from looseleaf.engine.engine import Engine, EngineParts
from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.engine.tiering.compute_time import ComputeTime
from looseleaf.engine.tiering.load_controller import LoadingController
from looseleaf.errors import InvalidOption
from looseleaf.llm.llm import make_config
from looseleaf.llm.load import load_model, make_engine, reference_model
from looseleaf.models import read_config
from looseleaf.prompt.request import Document, Request
from looseleaf.sampling_params import SamplingParams
from looseleaf.tiers import DiskTier, Ledger, RemoteTier, Tier, Tiers
from looseleaf_lab.bench.model_shapes import model_shape
from looseleaf_lab.bench.progress import SILENT, Progress
from looseleaf_lab.bench.random_model import random_decoder, random_engine
from looseleaf_lab.bench.results import Row
from looseleaf_lab.bench.throttled import ThrottledTier

LEAST = 0.15
Prompt = list[Document | str]
_ALL = "all"


@dataclass(frozen=True)
class TierBench:
    """``make`` returns an engine with its own pool (`of_checkpoint`, `of_shape`).

    Tiers have room for ``space`` bytes. ``slowness`` is the load time of a throttled tier as a
    multiple of the compute time. ``ratios`` are swept, with ``repetitions`` of every arm."""

    make: Callable[[], Engine]
    name: str
    space: int = 1 << 30
    slowness: tuple[tuple[str, float], ...] = (("fast", 0.1), ("medium", 0.6), ("slow", 1.4))
    ratios: tuple[float, ...] = (0.15, 0.25, 0.4, 0.6, 1.0)
    repetitions: int = 5
    seed: int = 0


def of_checkpoint(model: Path, device: str, num_pages: int) -> Callable[[], Engine]:
    """A factory of engines over a checkpoint, in fp32."""
    options = {"device": device, "num_pages": num_pages, "dtype": "float32"}
    config = make_config(options)
    return partial(make_engine, load_model(model, config), config)


def of_shape(shape: str, device: torch.device, num_pages: int) -> Callable[[], Engine]:
    """A factory of engines over the same random weights of a shape.

    Raises InvalidOption for an unknown shape, or for a vocabulary smaller than that of the
    reference model, which encodes the documents."""
    vocab_size = read_config(reference_model()).vocab_size
    if (shape_vocab_size := model_shape(shape).vocab_size) < vocab_size:
        raise InvalidOption(
            f"shape {shape!r} has {shape_vocab_size} tokens, and documents need {vocab_size}: use "
            "another shape"
        )
    config = make_config({"device": str(device), "num_pages": num_pages})
    return partial(random_engine, shape, config, device, random_decoder(shape, device))


@dataclass(frozen=True)
class _Arm:
    """A policy, and the source of its documents: loaded from a tier, computed, or ``chosen`` by
    the controller."""

    label: str
    fuse: Fuse
    documents: Literal["loaded", "computed", "chosen"]


class _Always(LoadingController):
    """A controller that always loads, for the sweep."""

    def passes_over(self, loading: float, computing: float, names: Iterable[str]) -> bool:
        return False


@dataclass(eq=False)
class _Target:
    """An engine over one tier, or over all of them."""

    name: str
    engine: Engine
    controller: LoadingController = field(init=False)
    always_load: LoadingController = field(init=False)

    def __post_init__(self) -> None:
        controller = self.engine.tiering.controller
        assert controller is not None, "an engine over tiers"
        self.controller = controller
        self.always_load = _Always(
            controller.tiers,
            controller.compute_time,
            controller.num_layers,
            controller.replayed_rows,
        )

    @property
    def salt(self) -> str:
        """A salt that hides another engine's records: these would be in one tier only."""
        return self.name if self.name == _ALL else ""

    def arms(self, config: TierBench) -> list[_Arm]:
        """The arms of this target."""
        controller = _Arm("controller", Fuse("random", ratio=LEAST, balanced=True), "chosen")
        if self.name == _ALL:
            return [controller]
        swept = [_Arm("sweep", Fuse("random", ratio=ratio), "loaded") for ratio in config.ratios]
        return [*swept, controller, _Arm("computed", Fuse("random", ratio=LEAST), "computed")]


_Cell = tuple[_Target, _Arm]


def measure(
    config: TierBench,
    texts: Sequence[str],
    question: str,
    folder: Path,
    progress: Progress = SILENT,
) -> Iterator[Row]:
    """Rows of every tier, the sweep first; the disk tier writes to ``folder``.

    A remote tier needs a Redis or Valkey server on this machine. Since arms alternate, rows follow
    the last round; an interrupted run yields its complete rounds."""
    prompt: Prompt = [*(Document(text, f"document {n}") for n, text in enumerate(texts)), question]
    space = config.space
    with _redis() as url:
        progress.stage("compute time of the documents")
        rates = _rates(config, prompt)
        progress.stage("making an engine over each tier")
        tiers: list[tuple[str, list[Tier]]] = [
            (name, [ThrottledTier(name, rate, 0.001, space)]) for name, rate in rates
        ]
        tiers.append(("disk", [DiskTier(folder / "alone", Ledger(space))]))
        if url is not None:
            tiers.append(("remote", [RemoteTier(url)]))
        every_tier: list[Tier] = [ThrottledTier(n, r, 0.001, space) for n, r in reversed(rates)]
        every_tier.append(DiskTier(folder / "all", Ledger(space)))
        every_tier += [RemoteTier(url)] if url else []
        targets = [_Target(name, _engine(config, tier_list)) for name, tier_list in tiers]
        all_tiers = _Target(_ALL, _engine(config, every_tier))
        outputs = {
            (p, arm): list[RequestOutput]() for p in [*targets, all_tiers] for arm in p.arms(config)
        }
        try:
            _run_rounds(config, outputs, prompt, progress)
        finally:
            for target in (*targets, all_tiers):
                target.engine.close()
            if all(outputs.values()):
                yield from _compared(config, outputs)


def _compared(config: TierBench, outputs: Mapping[_Cell, Sequence[RequestOutput]]) -> Iterator[Row]:
    """A row per arm with the best time of its target; the target of all tiers compares with the
    best of all."""
    best = dict[str, float]()
    for target in dict.fromkeys(target for target, _ in outputs):
        rows = [_row(config, target, arm, outputs[target, arm]) for arm in target.arms(config)]
        # the target of all tiers is the last one
        best[target.name] = min(best.values()) if target.name == _ALL else _best(rows)
        for row in rows:
            yield row | {"times_best": float(row["seconds_low"]) / best[target.name]}


def _rates(config: TierBench, prompt: Prompt) -> list[tuple[str, float]]:
    """Bytes/s of the throttled tiers, from the time to compute all documents."""
    engine = _engine(config, [ThrottledTier("any", 1e9, 0.0, config.space)])
    target, arm = _Target("any", engine), _Arm("computed", Fuse("random", ratio=LEAST), "computed")
    outputs = [_answer(target, arm, prompt) for _ in range(config.repetitions + 2)][2:]
    engine.close()
    seconds = statistics.median(map(_first_token, outputs))
    lengths = [document.num_tokens for document in outputs[0].reuse.documents]
    assert engine.tiers is not None
    num_bytes = sum(map(engine.tiers.num_bytes, lengths))
    return [(name, num_bytes / (slowness * seconds)) for name, slowness in config.slowness]


def _best(rows: Sequence[Row]) -> float:
    """The fastest repetition of any arm but the controller's; other load only adds time."""
    return min(float(row["seconds_low"]) for row in rows if row["arm"] != "controller")


def _engine(config: TierBench, tiers: list[Tier]) -> Engine:
    """An engine over these tiers, which has measured them."""
    base = config.make()
    runner = replace(base.runner, compute_time=ComputeTime())
    # room to write all documents in parallel, because a skipped write would be missing at the load
    staging = max(1.0, config.space / 2**31)
    tiers_of_engine = Tiers(runner.pool, tiers, TierConfig(tier_timeout=60.0, staging_gib=staging))
    keys, longest = base.documents.keys, base.max_model_len
    return Engine(EngineParts(base.config, runner, base.tokenizer, keys, longest, tiers_of_engine))


def _run_rounds(
    config: TierBench,
    outputs: Mapping[_Cell, list[RequestOutput]],
    prompt: Prompt,
    progress: Progress,
) -> None:
    """Run all arms once as a warm-up, then in rounds of random order.

    The target of all tiers has only a controller arm. More runs teach it as many loads as a sweep
    has."""
    rng = random.Random(config.seed)
    rounds = range(config.repetitions + 1)
    for round_number in progress.over(rounds, lambda round_number: f"round {round_number + 1}"):
        cells = rng.sample([*outputs], len(outputs))
        for target, arm in progress.over(cells, lambda cell: f"{cell[0].name}, {cell[1].label}"):
            for _ in config.ratios if target.name == _ALL else ():
                _answer_cold(target, arm, prompt)
            output = _answer_cold(target, arm, prompt)
            if round_number:
                outputs[target, arm].append(output)


def _answer_cold(target: _Target, arm: _Arm, prompt: Prompt) -> RequestOutput:
    """An answer with an empty pool; in the first round the tiers are empty too."""
    engine = target.engine
    engine.tiering.release_pages()
    engine.store.evict_idle()
    output = _answer(target, arm, prompt)
    assert engine.tiers is not None
    engine.tiers.flush()
    _cool(engine.tiers)
    return output


def _cool(tiers: Tiers) -> None:
    """Drop the disk tiers' files from the system's page cache."""
    for guard in tiers.guards:
        if isinstance(guard.tier, DiskTier):
            for entry in guard.tier.entries():
                guard.tier.drop_page_cache(entry.key)


def _answer(target: _Target, arm: _Arm, prompt: Prompt) -> RequestOutput:
    engine = target.engine
    parts = engine.prompts.from_parts([*prompt])
    # no tier has records under a new salt
    salt = f"{time.perf_counter()}" if arm.documents == "computed" else target.salt
    params = SamplingParams(max_tokens=1, temperature=0.0)
    engine.tiering.controller = (
        target.always_load if arm.documents == "loaded" else target.controller
    )
    progress = engine.add(Request("asked", parts, params, salt, fuse=arm.fuse))
    while engine.has_work:
        engine.step()
    if progress.error is not None:
        raise progress.error
    if arm.documents == "computed":
        assert engine.tiers is not None
        engine.tiers.flush()
        engine.tiers.delete([use.key for use in progress.outputs[0].sequence.documents])
    return progress.output()


def _row(config: TierBench, target: _Target, arm: _Arm, outputs: Sequence[RequestOutput]) -> Row:
    seconds = list(map(_first_token, outputs))
    loading = [o.reuse.loading for o in outputs if o.reuse.loading is not None]
    ratios = [o.reuse.fuse.ratio or 0.0 for o in outputs if o.reuse.fuse is not None]
    names = {name for load in loading for name in load.tiers}
    return {
        "model": config.name,
        "tier": target.name,
        "arm": arm.label,
        "documents": len(outputs[0].reuse.documents),
        "document_tokens": outputs[0].reuse.document_tokens,
        "ratio": statistics.median(ratios),
        "loaded_from": " ".join(sorted(names)) or "nowhere",
        "mib": min((load.num_bytes for load in loading), default=0) / (1 << 20),
        "repetitions": len(outputs),
        "seconds": statistics.median(seconds),
        "seconds_low": min(seconds),
        "seconds_high": max(seconds),
        "load_seconds": _median([r.load_seconds for r in loading]),
        "load_predicted": _median([r.load_predicted for r in loading]),
        "total_predicted": _median([r.total_predicted for r in loading]),
        "times_best": 0.0,
    }


def _first_token(output: RequestOutput) -> float:
    """Seconds from admission to the first token."""
    return (output.metrics.first_token or 0.0) - (output.metrics.admitted or 0.0)


def _median(values: Sequence[float | None]) -> float:
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else 0.0


@contextmanager
def _redis() -> Iterator[str | None]:
    """The URL of a server that this run starts on the loopback, or None without a program."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    process = subprocess.Popen([*command, "--appendonly", "no"], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except ConnectionRefusedError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise InvalidOption(
                        f"{program} does not start: run it by hand to see why"
                    ) from error
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait()

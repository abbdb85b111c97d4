"""``bench tiers``: what the loading controller (after CacheBlend, arXiv 2405.16444, section 5.1)
chooses, against a sweep of ratios on every tier.

The same documents are loaded from one tier after another while a share of their tokens is computed
again (`Fuse("random")`); the time until the first token is measured for shares from small to all,
for computing the documents instead of loading them, and for what the controller chooses: a share
(``balanced``), and whether to load. One more engine has all tiers at once, and the controller picks
one. All take turns. The goal, which is ours, is a controller within 10 % of the best that the sweep
finds."""

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
from looseleaf.engine.tiering.compute_time import ComputePace
from looseleaf.engine.tiering.load_controller import LoadingController
from looseleaf.errors import InvalidOption
from looseleaf.llm.llm import make_config
from looseleaf.llm.load import load_model, make_engine, reference_model
from looseleaf.models import read_config
from looseleaf.prompt.request import Document, Request
from looseleaf.sampling_params import SamplingParams
from looseleaf.tiers import DiskTier, Ledger, RemoteTier, Tier, Tiers
from looseleaf_lab.bench.progress import SILENT, Progress
from looseleaf_lab.bench.random_model import model_shape, random_decoder, random_engine
from looseleaf_lab.bench.results import Row
from looseleaf_lab.bench.throttled import ThrottledTier

LEAST = 0.15
Prompt = list[Document | str]
_ALL = "all"


@dataclass(frozen=True)
class TierBench:
    """``make`` gives an engine, each over a pool of its own (`of_checkpoint`, `of_shape`); tiers
    that it is given hold up to ``space`` bytes. From the throttled ones documents take so many
    times as long to load as to compute (``slowness``); ``ratios`` are swept; every arm is measured
    ``repetitions`` times, in turn."""

    make: Callable[[], Engine]
    name: str
    space: int = 1 << 30
    slowness: tuple[tuple[str, float], ...] = (("fast", 0.1), ("medium", 0.6), ("slow", 1.4))
    ratios: tuple[float, ...] = (0.15, 0.25, 0.4, 0.6, 1.0)
    repetitions: int = 5
    seed: int = 0


def of_checkpoint(model: Path, device: str, num_pages: int) -> Callable[[], Engine]:
    """What makes engines over a checkpoint, in fp32."""
    options = {"device": device, "num_pages": num_pages, "dtype": "float32"}
    config = make_config(options)
    return partial(make_engine, load_model(model, config), config)


def of_shape(shape: str, device: torch.device, num_pages: int) -> Callable[[], Engine]:
    """What makes engines over the same random weights of a shape.

    Raises InvalidOption for a shape that is unknown, or has no room for the reference model's
    vocabulary: documents are text."""
    needed = read_config(reference_model()).vocab_size
    if (known := model_shape(shape).vocab_size) < needed:
        raise InvalidOption(
            f"shape {shape!r} knows {known} tokens, and documents are of {needed}: use another"
        )
    config = make_config({"device": str(device), "num_pages": num_pages})
    return partial(random_engine, shape, config, device, random_decoder(shape, device))


@dataclass(frozen=True)
class _Arm:
    """A way to answer, with a policy: from what the tiers have, by computing the documents, or as
    the controller ``chooses``."""

    label: str
    fuse: Fuse
    documents: Literal["loaded", "computed", "chosen"]


class _Always(LoadingController):
    """Loads what a tier has, whatever it expects that to take: a sweep is of loading."""

    def passes_over(self, loading: float, computing: float, names: Iterable[str]) -> bool:
        return False


@dataclass(eq=False)
class _Place:
    """An engine over one tier, or over all of them."""

    name: str
    engine: Engine
    own: LoadingController = field(init=False)
    always: LoadingController = field(init=False)

    def __post_init__(self) -> None:
        controller = self.engine.tiering.controller
        assert controller is not None, "an engine over tiers"
        self.own = controller
        self.always = _Always(
            controller.tiers, controller.pace, controller.num_layers, controller.replayed_rows
        )

    @property
    def salt(self) -> str:
        """What another engine left in a tier that both have would be in that tier only."""
        return self.name if self.name == _ALL else ""

    def arms(self, config: TierBench) -> list[_Arm]:
        """What is measured there."""
        controller = _Arm("controller", Fuse("random", ratio=LEAST, balanced=True), "chosen")
        if self.name == _ALL:
            return [controller]
        swept = [_Arm("sweep", Fuse("random", ratio=ratio), "loaded") for ratio in config.ratios]
        return [*swept, controller, _Arm("computed", Fuse("random", ratio=LEAST), "computed")]


_Cell = tuple[_Place, _Arm]


def measure(
    config: TierBench,
    texts: Sequence[str],
    question: str,
    folder: Path,
    progress: Progress = SILENT,
) -> Iterator[Row]:
    """Rows of every tier, those of the sweep first; ``folder`` is where the disk tier may write.

    Without a Redis or Valkey server on this machine there are no rows of one. Rows come at the end,
    since all take turns; who interrupts it gets those of the turns that were."""
    prompt: Prompt = [*(Document(text, f"document {n}") for n, text in enumerate(texts)), question]
    space = config.space
    with _redis() as url:
        progress.stage("how fast this machine computes documents")
        rates = _rates(config, prompt)
        progress.stage("making an engine over each tier")
        tiers: list[tuple[str, list[Tier]]] = [
            (name, [ThrottledTier(name, rate, 0.001, space)]) for name, rate in rates
        ]
        tiers.append(("disk", [DiskTier(folder / "alone", Ledger(space))]))
        if url is not None:
            tiers.append(("remote", [RemoteTier(url)]))
        everything: list[Tier] = [ThrottledTier(n, r, 0.001, space) for n, r in reversed(rates)]
        everything.append(DiskTier(folder / "all", Ledger(space)))
        everything += [RemoteTier(url)] if url else []
        places = [_Place(name, _engine(config, held)) for name, held in tiers]
        together = _Place(_ALL, _engine(config, everything))
        outputs = {
            (p, arm): list[RequestOutput]() for p in [*places, together] for arm in p.arms(config)
        }
        try:
            _in_turn(config, outputs, prompt, progress)
        finally:
            for place in (*places, together):
                place.engine.close()
            if all(outputs.values()):
                yield from _compared(config, outputs)


def _compared(config: TierBench, outputs: Mapping[_Cell, Sequence[RequestOutput]]) -> Iterator[Row]:
    """A row for every arm, beside the best of its place; all tiers at once beside the best of
    all."""
    best = dict[str, float]()
    for place in dict.fromkeys(place for place, _ in outputs):
        rows = [_row(config, place, arm, outputs[place, arm]) for arm in place.arms(config)]
        # all tiers together come last
        best[place.name] = min(best.values()) if place.name == _ALL else _best(rows)
        for row in rows:
            yield row | {"times_best": float(row["seconds_low"]) / best[place.name]}


def _rates(config: TierBench, prompt: Prompt) -> list[tuple[str, float]]:
    """Bytes a second of the throttled tiers: by what it takes to compute all."""
    engine = _engine(config, [ThrottledTier("any", 1e9, 0.0, config.space)])
    place, arm = _Place("any", engine), _Arm("computed", Fuse("random", ratio=LEAST), "computed")
    outputs = [_ask(place, arm, prompt) for _ in range(config.repetitions + 2)][2:]
    engine.close()
    seconds = statistics.median(map(_first_token, outputs))
    lengths = [document.num_tokens for document in outputs[0].reuse.documents]
    assert engine.tiers is not None
    num_bytes = sum(map(engine.tiers.num_bytes, lengths))
    return [(name, num_bytes / (slowness * seconds)) for name, slowness in config.slowness]


def _best(rows: Sequence[Row]) -> float:
    """The quickest of all but the controller, by its quickest repetition: what else the machine
    does only adds to it."""
    return min(float(row["seconds_low"]) for row in rows if row["arm"] != "controller")


def _engine(config: TierBench, tiers: list[Tier]) -> Engine:
    """An engine over these tiers, which has measured them."""
    made = config.make()
    runner = replace(made.runner, pace=ComputePace())
    # all documents on their way to a tier at once: what is left out would not be there to load
    staging = max(1.0, config.space / 2**31)
    held = Tiers(runner.pool, tiers, TierConfig(tier_timeout=60.0, staging_gib=staging))
    keys, longest = made.documents.keys, made.max_model_len
    return Engine(EngineParts(made.config, runner, made.tokenizer, keys, longest, held))


def _in_turn(
    config: TierBench,
    outputs: Mapping[_Cell, list[RequestOutput]],
    prompt: Prompt,
    progress: Progress,
) -> None:
    """All arms of all places once, not counted, then again and again in ever new order: what else
    the machine does meets all of them. All tiers at once have nothing but a controller, which has
    seen as many loads as those of the other places, whose sweeps teach them, before one counts."""
    rng = random.Random(config.seed)
    turns = range(config.repetitions + 1)
    for turn in progress.over(turns, lambda turn: f"round {turn + 1}"):
        drawn = rng.sample([*outputs], len(outputs))
        for place, arm in progress.over(drawn, lambda cell: f"{cell[0].name}, {cell[1].label}"):
            for _ in config.ratios if place.name == _ALL else ():
                _ask_cold(place, arm, prompt)
            output = _ask_cold(place, arm, prompt)
            if turn:
                outputs[place, arm].append(output)


def _ask_cold(place: _Place, arm: _Arm, prompt: Prompt) -> RequestOutput:
    """Ask with nothing in the pool, nor what was computed last and is held until it has left; and
    the first time nothing in the tiers either."""
    engine = place.engine
    engine.tiering.release_pages()
    engine.store.evict_idle()
    output = _ask(place, arm, prompt)
    assert engine.tiers is not None
    engine.tiers.flush()
    _cool(engine.tiers)
    return output


def _cool(tiers: Tiers) -> None:
    """Make the system forget what it holds of the disk in memory: the next read is the disk's."""
    for guard in tiers.guards:
        if isinstance(guard.tier, DiskTier):
            for entry in guard.tier.entries():
                guard.tier.cool(entry.key)


def _ask(place: _Place, arm: _Arm, prompt: Prompt) -> RequestOutput:
    engine = place.engine
    parts = engine.prompts.from_parts([*prompt])
    # what a salt of its own asks for is in no tier
    salt = f"{time.perf_counter()}" if arm.documents == "computed" else place.salt
    params = SamplingParams(max_tokens=1, temperature=0.0)
    engine.tiering.controller = place.always if arm.documents == "loaded" else place.own
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


def _row(config: TierBench, place: _Place, arm: _Arm, outputs: Sequence[RequestOutput]) -> Row:
    seconds = list(map(_first_token, outputs))
    loading = [o.reuse.loading for o in outputs if o.reuse.loading is not None]
    ratios = [o.reuse.fuse.ratio or 0.0 for o in outputs if o.reuse.fuse is not None]
    names = {name for report in loading for name in report.tiers}
    return {
        "model": config.name,
        "tier": place.name,
        "arm": arm.label,
        "documents": len(outputs[0].reuse.documents),
        "document_tokens": outputs[0].reuse.document_tokens,
        "ratio": statistics.median(ratios),
        "loaded_from": " ".join(sorted(names)) or "nowhere",
        "mib": min((report.num_bytes for report in loading), default=0) / (1 << 20),
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
    """Seconds from admission."""
    return (output.metrics.first_token or 0.0) - (output.metrics.admitted or 0.0)


def _median(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else 0.0


@contextmanager
def _redis() -> Iterator[str | None]:
    """A server of this run's own on the loopback, None where there is none."""
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
        end = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except ConnectionRefusedError as error:
                if process.poll() is not None or time.monotonic() > end:
                    raise InvalidOption(f"{program} does not start: see why by hand") from error
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait()

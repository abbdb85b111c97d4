"""Engines made, used, mixed and closed again and again in one process, to find what no test of one
engine finds: memory that is freed while it is read, lists that outgrow their buffers, threads that
outlive their engine.

    python -m tools.stress --device cuda --seconds 60 --seed 1

Random weights; every request is first answered by an engine that does nothing else, and each later
answer is compared with that one: the same tokens, or others that were as likely. Engines differ in
tiers, pages, graphs and stored dtype; requests blend, choose, revise, throw keys away and read
hosted documents, several at a time; some are aborted, some engines closed while they load. On a CPU
the model is tiny. ``--say`` prints every request before it runs. With ``--fences`` each tensor of a
GPU lies at the end of a mapping of its own (`looseleaf_lab.testing.fences`), which is slower. Exits
with 1 if an answer differs."""

import argparse
import dataclasses
import gc
import random
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence

import torch

from looseleaf.config import (
    CacheConfig,
    EngineConfig,
    Fuse,
    IndexConfig,
    Revise,
    SchedulerConfig,
    Select,
    TierConfig,
)
from looseleaf.engine.engine import Engine
from looseleaf.engine.progress import RequestProgress
from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.engine.tiering.compute_time import ComputePace
from looseleaf.errors import InvalidRequest
from looseleaf.models import Decoder
from looseleaf.prompt.request import DocumentPart, Policies, PromptParts, Request, TextPart
from looseleaf.sampling_params import SamplingParams
from looseleaf_lab.bench.random_model import MODEL_SHAPES, random_engine, random_weights
from looseleaf_lab.testing.fences import Fences

_VOCAB = 512
_QUESTION = 64
_NUM_DOCUMENTS = 4
# how much less likely than the likeliest a token may be that was drawn in its stead
_TOLERANCE = {"float32": 2e-3, "bfloat16": 0.15, "fp8": 0.3}


@dataclasses.dataclass(frozen=True)
class Ask:
    """What is asked again and again, and how. ``hosted`` reads its first document from the host's
    memory."""

    name: str
    parts: PromptParts
    policies: Policies
    outputs: int = 1
    hosted: bool = False


@dataclasses.dataclass(frozen=True)
class Kind:
    """What is special about an engine."""

    tiers: str = ""
    num_pages: float = 3.0
    host_share: float = 2.0
    graphs: bool = True
    chunk: int | None = None
    fp8: bool = False
    batch_invariant: bool = False

    def __str__(self) -> str:
        said = [self.tiers or "no tier", f"pages x{self.num_pages:g}"]
        said += [] if self.graphs else ["no graphs"]
        said += [f"chunks of {self.chunk}"] if self.chunk else []
        said += [name for name in ("fp8", "batch_invariant") if getattr(self, name)]
        return ", ".join(said)


KINDS = (
    Kind("host"),
    Kind(),
    Kind("host", 1.3, chunk=256),
    Kind("host", 2.0, host_share=0.6),
    Kind("disk", 1.5),
    Kind("host+disk", 2.0, host_share=0.6, graphs=False),
    Kind("host", 3.0, fp8=True),
    Kind("host", 1.3, batch_invariant=True),
    Kind("host+disk", 1.3, host_share=0.4, chunk=512),
)


class Stress:
    """The engines of one run; ``found`` says what went wrong."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.shape = "tiny" if self.device.type == "cpu" else "llama-3.1-8b"
        layers = options.layers or (2 if self.device.type == "cpu" else 4)
        model = dataclasses.replace(MODEL_SHAPES[self.shape], num_layers=layers, vocab_size=_VOCAB)
        self.dtype = model.torch_dtype
        weights = random_weights(model, getattr(torch, self.dtype), self.device)
        self.decoder = Decoder(model, weights)
        self.draw = random.Random(options.seed)
        self.asks = list(_asks(options.document, layers))
        self.right: dict[tuple[bool, str], RequestOutput] = {}
        self.found: list[str] = []
        self.answers = self.engines = self.loads = self.aborted = self.refused = 0
        self.worst = 0.0
        self.disk = ""
        self.left: weakref.WeakSet[Engine] = weakref.WeakSet()

    def engine(self, kind: Kind) -> Engine:
        """An engine of a kind, over the model that all share."""
        length = (_NUM_DOCUMENTS + 1) * self.options.document + 512
        model = self.decoder.config
        document = 2 * model.num_layers * model.num_kv_heads * model.head_dim
        document *= self.options.document * getattr(torch, self.dtype).itemsize
        gib = _NUM_DOCUMENTS * document / 2**30
        tiers = TierConfig(
            host_gib=kind.host_share * gib if "host" in kind.tiers else 0.0,
            disk_path=self.disk if "disk" in kind.tiers else None,
            tier_timeout=60.0,
            staging_gib=2 * gib,
        )
        config = EngineConfig(
            device=str(self.device),
            max_model_len=length,
            cuda_graphs=kind.graphs and not self.options.no_graphs,
            cache=CacheConfig(
                num_pages=int(kind.num_pages * (length // 16)),
                kv_dtype="fp8" if kind.fp8 else "auto",
            ),
            scheduler=SchedulerConfig(
                max_num_batched_tokens=kind.chunk,
                batch_invariant=kind.batch_invariant,
            ),
            tiers=tiers,
        )
        made = random_engine(self.shape, config, self.device, self.decoder)
        if made.tiering.controller is not None:
            # of a pace that is not known a document is always loaded
            made.tiering.controller.pace = ComputePace()
        self.engines += 1
        return made

    def add(self, engine: Engine, ask: Ask) -> RequestProgress | None:
        """Hand a request in; None if it is larger than the pool, or not for such an engine."""
        if ask.hosted:
            job = engine.hosting.add((ask.parts[0], TextPart(())), "", IndexConfig("flat"))
            while not job.finished.is_set():
                engine.step()
            if job.error is not None:
                raise job.error
        params = SamplingParams(
            n=ask.outputs, temperature=1.0, top_k=1, max_tokens=self.options.tokens,
            ignore_eos=True, logprobs=8,
        )  # fmt: skip
        self.answers += 1
        name = f"{self.answers}-{ask.name}"
        if self.options.say:
            print(f"{time.perf_counter():.3f} {name}", flush=True)
        try:
            return engine.add(Request(name, ask.parts, params, **ask.policies))
        except InvalidRequest:
            self.refused += 1
            return None

    def learn(self, fp8: bool) -> None:
        """The answers of an engine that is asked one thing at a time."""
        engine = self.engine(Kind(num_pages=3.0, fp8=fp8))
        for ask in self.asks:
            # hosted documents are stored as they were computed
            progress = None if fp8 and ask.hosted else self.add(engine, ask)
            if progress is not None:
                self.run([engine])
                self.right[fp8, ask.name] = progress.output()
        engine.close()
        print(f"{self._seconds:.1f} s: {len(self.right)} answers known", flush=True)

    def _fitting(self, fp8: bool) -> list[Ask]:
        return [ask for ask in self.asks if (fp8, ask.name) in self.right]

    def run(self, engines: list[Engine], least: int = 0) -> None:
        """Step engines in turn until they have no work, or ``least`` times."""
        steps = 0
        while any(engine.has_work for engine in engines) and not (least and steps >= least):
            for engine in engines:
                if engine.has_work:
                    engine.step()
            steps += 1

    def forget(self, engine: Engine) -> None:
        """Have documents only in the tiers, sooner or later."""
        if engine.tiers is not None and self.draw.random() < 0.8:
            if self.draw.random() < 0.7:
                engine.tiers.flush(60.0)
            engine.tiering.release_pages()
            engine.store.evict_idle()

    def round(self, kinds: list[Kind]) -> None:
        """Engines that live at the same time, some rounds of requests, and how they end."""
        if any(kind.fp8 for kind in kinds) and not self._fitting(fp8=True):
            self.learn(fp8=True)
        engines = [self.engine(kind) for kind in kinds]
        for _ in range(self.draw.choice([3, 6, 12])):
            if self.over:
                break
            asked: list[tuple[Kind, Ask, RequestProgress]] = []
            for kind, engine in zip(kinds, engines, strict=True):
                self.forget(engine)
                for ask in self.draw.choices(
                    self._fitting(kind.fp8), k=self.draw.choice([1, 1, 2, 4])
                ):
                    if ask.hosted and kind.batch_invariant:
                        continue
                    progress = self.add(engine, ask)
                    if progress is not None:
                        asked.append((kind, ask, progress))
            if asked and self.draw.random() < 0.2:
                self.run(engines, self.draw.choice([1, 2, 5]))
                self._abort(engines, self.draw.choice(asked)[2])
            self.run(engines)
            for kind, ask, progress in asked:
                self.compare(kind, ask, progress)
            for engine in engines:
                engine.check()
        for engine in engines:
            self._end(engine)

    def _abort(self, engines: list[Engine], progress: RequestProgress) -> None:
        for engine in engines:
            if engine.knows(progress.request.request_id):
                engine.abort(progress.request.request_id)
                self.aborted += 1

    def _end(self, engine: Engine) -> None:
        """Close an engine, with work on its way or without, or let it go unclosed."""
        if engine.tiers is not None:
            self.loads += sum(counters.loads for counters in engine.tiers.counters.values())
        if self.draw.random() < 0.4:
            self.forget(engine)
            self.add(engine, self.draw.choice([ask for ask in self.asks if not ask.hosted]))
            self.run([engine], self.draw.choice([1, 2]))
        if self.draw.random() < 0.8:
            engine.close()
        else:
            self.left.add(engine)

    def compare(self, kind: Kind, ask: Ask, progress: RequestProgress) -> None:
        """Whether every token is that of the first answer, or as likely as that, up to the first
        one that is another."""
        if progress.error is not None:
            self.found.append(f"{kind}: {ask.name}: {progress.error!r}")
            return
        right = self.right[kind.fp8, ask.name]
        tolerance = _TOLERANCE["fp8" if kind.fp8 else self.dtype]
        for output, expected in zip(progress.output().outputs, right.outputs, strict=True):
            if output.finish_reason == "abort":
                continue
            for got, known in zip(output.logprobs or (), expected.logprobs or (), strict=True):
                likely = {entry.token_id: entry.logprob for entry in known}
                away = known[0].logprob - likely.get(got[0].token_id, -1e9)
                away = max(away, abs(got[0].logprob - known[0].logprob))
                self.worst = max(self.worst, away)
                if away > tolerance:
                    self.found.append(
                        f"{kind}: {ask.name}: {output.token_ids} for {expected.token_ids}, {away:g}"
                    )
                    print(self.found[-1], flush=True)
                if away > tolerance or got[0].token_id != known[0].token_id:
                    break

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return self._seconds > float(self.options.seconds)

    def __call__(self) -> int:
        """Run; 1 if something was found."""
        with tempfile.TemporaryDirectory() as self.disk:
            self._run()
            for engine in self.left:
                engine.close()
        return 1 if self.found else 0

    def _run(self) -> None:
        self.begun = time.perf_counter()
        self.learn(fp8=False)
        rounds = 0
        while not self.over and rounds < self.options.rounds:
            count = self.draw.choice([1, 1, 2])
            known = [kind for kind in KINDS if not (kind.fp8 and self.options.no_fp8)]
            turns = [rounds + n * self.draw.randrange(9) for n in range(count)]
            kinds = [known[turn % len(known)] for turn in turns]
            print(f"{self._seconds:.1f} s: {' | '.join(map(str, kinds))}", flush=True)
            self.round(kinds)
            self._disturb()
            rounds += 1
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        print(
            f"seed {self.options.seed}: {self.engines} engines, {self.answers} requests "
            f"({self.refused} refused, {self.aborted} aborted), {self.loads} loads; farthest from "
            f"the first answer {self.worst:.3g}; {len(self.found)} differ; {self._seconds:.0f} s"
        )
        for line in self.found:
            print(line)

    def _disturb(self) -> None:
        """Collect, free, and write to memory that was freed."""
        if self.draw.random() < 0.5:
            gc.collect()
        if self.device.type == "cuda" and self.draw.random() < 0.5:
            torch.cuda.empty_cache()
        if self.device.type == "cuda":
            size = self.draw.choice([1, 30, 200]) << 20
            torch.full((size,), 0x7FFFFFFF, dtype=torch.int32, device=self.device)

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self.begun


def _asks(document: int, num_layers: int) -> Iterator[Ask]:
    draw = random.Random(7)

    def drawn(length: int) -> tuple[int, ...]:
        return tuple(draw.choices(range(_VOCAB), k=length))

    documents = [
        DocumentPart(drawn(document + 37 * n - 50), 0, f"d{n}") for n in range(_NUM_DOCUMENTS + 2)
    ]

    def parts(count: int = _NUM_DOCUMENTS) -> PromptParts:
        return (*draw.sample(documents, count), TextPart(drawn(_QUESTION)))

    fuses = {
        "reuse": None,
        "random 15 %": Fuse("random", ratio=0.15),
        "random 40 %": Fuse("random", ratio=0.4),
        "random 60 %": Fuse("random", ratio=0.6),
        "random 60 %, again": Fuse("random", ratio=0.6),
        "all": Fuse("all"),
        "first 16": Fuse("first", tokens=16),
        "deviation": Fuse("deviation", ratio=0.15, check_layers=(1,)),
        "question": Fuse("question", ratio=0.15),
        "ape": Fuse("ape"),
    }
    for name, fuse in fuses.items():
        yield Ask(name, parts(), {"fuse": fuse})
    yield Ask("reuse of one, twice", parts(1), {}, outputs=2)
    yield Ask("text", (TextPart(drawn(3 * document // 2)),), {})
    choice = Select("quest", tokens=document, dense_below=0, dense_layers=(0,))
    yield Ask("quest", parts(), {"select": choice})
    yield Ask("quest, revised", parts(), {"select": choice, "revise": Revise(4)})
    yield Ask("window", parts(), {"select": Select("window", tokens=document, dense_below=0)})
    for policy in ("snapkv", "tova", "h2o"):
        evicting = Select(policy, tokens=document)
        yield Ask(policy, (TextPart(drawn(3 * document // 2)),), {"select": evicting})
    yield Ask("random 60 %, quest", parts(), {"fuse": fuses["random 60 %"], "select": choice})
    retrieval = Select("retrieval", ratio=1.0)
    yield Ask("hosted", parts(1), {"select": retrieval}, hosted=True)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a run, from the command line if they are not given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=0, help="default: 4, on a CPU 2")
    parser.add_argument("--document", type=int, default=600, help="tokens of a document")
    parser.add_argument("--tokens", type=int, default=6, help="tokens of an answer")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--no-fp8", action="store_true")
    parser.add_argument("--say", action="store_true")
    parser.add_argument("--fences", action="store_true")
    return parser.parse_args(arguments)


def main() -> int:
    options = parsed()
    fences = Fences() if options.fences else None
    ended = Stress(options)()
    if fences is not None:
        print(fences.counts)
    return ended


if __name__ == "__main__":
    raise SystemExit(main())

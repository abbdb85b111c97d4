"""A stress test of engines that are created, mixed and closed repeatedly in one process.

    python -m tools.stress --device cuda --seconds 60 --seed 1

It finds reads of freed memory, overflows of buffers and threads that outlive their engine. An
engine without other requests gives the expected answers; later answers may differ only by ties.
Engines differ in tiers, pages, CUDA graphs and dtype. Requests fuse, select, revise, evict keys and
read hosted documents, concurrently. A part of the requests is aborted, and engines close during
loads. Weights are random, and the model is tiny on a CPU.

``--say`` prints every request before it runs. ``--fences`` puts each GPU tensor at the end of a
separate mapping (`looseleaf_lab.testing.fences`), which is slower. Exits with 1 on a difference."""

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
from looseleaf.engine.tiering.compute_time import ComputeTime
from looseleaf.errors import InvalidRequest
from looseleaf.models import Decoder
from looseleaf.prompt.request import DocumentPart, Policies, PromptParts, Request, TextPart
from looseleaf.sampling_params import SamplingParams
from looseleaf_lab.bench.model_shapes import MODEL_SHAPES
from looseleaf_lab.bench.random_model import random_engine, random_weights
from looseleaf_lab.testing.fences import Fences

_VOCAB = 512
_QUESTION = 64
_NUM_DOCUMENTS = 4
# most nats between the log-probabilities of an answer's token and the expected token
_TOLERANCE = {"float32": 2e-3, "bfloat16": 0.15, "fp8": 0.3}


@dataclasses.dataclass(frozen=True)
class RequestSpec:
    """A repeated request. ``hosted`` reads the first document from host memory."""

    name: str
    parts: PromptParts
    policies: Policies
    outputs: int = 1
    hosted: bool = False


@dataclasses.dataclass(frozen=True)
class EngineSpec:
    """The options of an engine."""

    tiers: str = ""
    num_pages: float = 3.0
    host_share: float = 2.0
    graphs: bool = True
    chunk: int | None = None
    fp8: bool = False
    batch_invariant: bool = False

    def __str__(self) -> str:
        options = [self.tiers or "no tier", f"pages x{self.num_pages:g}"]
        options += [] if self.graphs else ["no graphs"]
        options += [f"chunks of {self.chunk}"] if self.chunk else []
        options += [name for name in ("fp8", "batch_invariant") if getattr(self, name)]
        return ", ".join(options)


ENGINES = (
    EngineSpec("host"),
    EngineSpec(),
    EngineSpec("host", 1.3, chunk=256),
    EngineSpec("host", 2.0, host_share=0.6),
    EngineSpec("disk", 1.5),
    EngineSpec("host+disk", 2.0, host_share=0.6, graphs=False),
    EngineSpec("host", 3.0, fp8=True),
    EngineSpec("host", 1.3, batch_invariant=True),
    EngineSpec("host+disk", 1.3, host_share=0.4, chunk=512),
)


class Stress:
    """A run of the stress test; ``failures`` describes all differences."""

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
        self.specs = list(_specs(options.document, layers))
        self.expected: dict[tuple[bool, str], RequestOutput] = {}
        self.failures: list[str] = []
        self.answers = self.engines = self.loads = self.aborted = self.rejected = 0
        self.worst = 0.0
        self.disk = ""
        self.unclosed: weakref.WeakSet[Engine] = weakref.WeakSet()

    def engine(self, kind: EngineSpec) -> Engine:
        """An engine over the shared model."""
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
        engine = random_engine(self.shape, config, self.device, self.decoder)
        if engine.tiering.controller is not None:
            # without a known compute time documents are always loaded
            engine.tiering.controller.compute_time = ComputeTime()
        self.engines += 1
        return engine

    def add(self, engine: Engine, spec: RequestSpec) -> RequestProgress | None:
        """Add a request; None if the engine rejects it, as for a small pool."""
        if spec.hosted:
            job = engine.hosting.add((spec.parts[0], TextPart(())), "", IndexConfig("flat"))
            while not job.finished.is_set():
                engine.step()
            if job.error is not None:
                raise job.error
        params = SamplingParams(
            n=spec.outputs, temperature=1.0, top_k=1, max_tokens=self.options.tokens,
            ignore_eos=True, logprobs=8,
        )  # fmt: skip
        self.answers += 1
        name = f"{self.answers}-{spec.name}"
        if self.options.say:
            print(f"{time.perf_counter():.3f} {name}", flush=True)
        try:
            return engine.add(Request(name, spec.parts, params, **spec.policies))
        except InvalidRequest:
            self.rejected += 1
            return None

    def compute_expected(self, fp8: bool) -> None:
        """Store the answers of an engine that runs a request at a time."""
        engine = self.engine(EngineSpec(num_pages=3.0, fp8=fp8))
        for spec in self.specs:
            # hosted documents are never stored in fp8
            progress = None if fp8 and spec.hosted else self.add(engine, spec)
            if progress is not None:
                self.run([engine])
                self.expected[fp8, spec.name] = progress.output()
        engine.close()
        print(f"{self._seconds:.1f} s: {len(self.expected)} expected answers", flush=True)

    def _answerable(self, fp8: bool) -> list[RequestSpec]:
        return [spec for spec in self.specs if (fp8, spec.name) in self.expected]

    def run(self, engines: list[Engine], least: int = 0) -> None:
        """Step engines alternately until they have no work, or ``least`` times."""
        steps = 0
        while any(engine.has_work for engine in engines) and not (least and steps >= least):
            for engine in engines:
                if engine.has_work:
                    engine.step()
            steps += 1

    def evict(self, engine: Engine) -> None:
        """Evict idle documents from the pool, mostly after a flush to the tiers."""
        if engine.tiers is not None and self.draw.random() < 0.8:
            if self.draw.random() < 0.7:
                engine.tiers.flush(60.0)
            engine.tiering.release_pages()
            engine.store.evict_idle()

    def round(self, kinds: list[EngineSpec]) -> None:
        """Run concurrent engines with batches of requests, then close them."""
        if any(kind.fp8 for kind in kinds) and not self._answerable(fp8=True):
            self.compute_expected(fp8=True)
        engines = [self.engine(kind) for kind in kinds]
        for _ in range(self.draw.choice([3, 6, 12])):
            if self.over:
                break
            batch: list[tuple[EngineSpec, RequestSpec, RequestProgress]] = []
            for kind, engine in zip(kinds, engines, strict=True):
                self.evict(engine)
                specs = self._answerable(kind.fp8)
                for spec in self.draw.choices(specs, k=self.draw.choice([1, 1, 2, 4])):
                    if spec.hosted and kind.batch_invariant:
                        continue
                    progress = self.add(engine, spec)
                    if progress is not None:
                        batch.append((kind, spec, progress))
            if batch and self.draw.random() < 0.2:
                self.run(engines, self.draw.choice([1, 2, 5]))
                self._abort(engines, self.draw.choice(batch)[2])
            self.run(engines)
            for kind, spec, progress in batch:
                self.compare(kind, spec, progress)
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
        """Close an engine, idle or with work, or drop it without closing."""
        if engine.tiers is not None:
            self.loads += sum(counters.loads for counters in engine.tiers.counters.values())
        if self.draw.random() < 0.4:
            self.evict(engine)
            self.add(engine, self.draw.choice([spec for spec in self.specs if not spec.hosted]))
            self.run([engine], self.draw.choice([1, 2]))
        if self.draw.random() < 0.8:
            engine.close()
        else:
            self.unclosed.add(engine)

    def compare(self, kind: EngineSpec, spec: RequestSpec, progress: RequestProgress) -> None:
        """Compare tokens with the expected answer, up to the first tied token."""
        if progress.error is not None:
            self.failures.append(f"{kind}: {spec.name}: {progress.error!r}")
            return
        answer = self.expected[kind.fp8, spec.name]
        tolerance = _TOLERANCE["fp8" if kind.fp8 else self.dtype]
        for output, expected in zip(progress.output().outputs, answer.outputs, strict=True):
            if output.finish_reason == "abort":
                continue
            pairs = zip(output.logprobs or (), expected.logprobs or (), strict=True)
            for (entry, *_), expected_entries in pairs:
                expected_entry = expected_entries[0]
                logprobs = {e.token_id: e.logprob for e in expected_entries}
                gap = expected_entry.logprob - logprobs.get(entry.token_id, -1e9)
                gap = max(gap, abs(entry.logprob - expected_entry.logprob))
                self.worst = max(self.worst, gap)
                if gap > tolerance:
                    self.failures.append(
                        f"{kind}: {spec.name}: {output.token_ids} for {expected.token_ids}, {gap:g}"
                    )
                    print(self.failures[-1], flush=True)
                if gap > tolerance or entry.token_id != expected_entry.token_id:
                    break

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return self._seconds > float(self.options.seconds)

    def __call__(self) -> int:
        """Run all rounds; returns 1 if an answer differs, else 0."""
        with tempfile.TemporaryDirectory() as self.disk:
            self._run()
            for engine in self.unclosed:
                engine.close()
        return 1 if self.failures else 0

    def _run(self) -> None:
        self.start = time.perf_counter()
        self.compute_expected(fp8=False)
        rounds = 0
        while not self.over and rounds < self.options.rounds:
            count = self.draw.choice([1, 1, 2])
            candidates = [kind for kind in ENGINES if not (kind.fp8 and self.options.no_fp8)]
            indices = [rounds + n * self.draw.randrange(9) for n in range(count)]
            kinds = [candidates[index % len(candidates)] for index in indices]
            print(f"{self._seconds:.1f} s: {' | '.join(map(str, kinds))}", flush=True)
            self.round(kinds)
            self._disturb()
            rounds += 1
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        print(
            f"seed {self.options.seed}: {self.engines} engines, {self.answers} requests "
            f"({self.rejected} rejected, {self.aborted} aborted), {self.loads} loads; largest "
            f"deviation {self.worst:.3g}; {len(self.failures)} failures; {self._seconds:.0f} s"
        )
        for failure in self.failures:
            print(failure)

    def _disturb(self) -> None:
        """Collect garbage, free memory, and overwrite freed memory."""
        if self.draw.random() < 0.5:
            gc.collect()
        if self.device.type == "cuda" and self.draw.random() < 0.5:
            torch.cuda.empty_cache()
        if self.device.type == "cuda":
            size = self.draw.choice([1, 30, 200]) << 20
            torch.full((size,), 0x7FFFFFFF, dtype=torch.int32, device=self.device)

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self.start


def _specs(document: int, num_layers: int) -> Iterator[RequestSpec]:
    draw = random.Random(7)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(draw.choices(range(_VOCAB), k=length))

    documents = [
        DocumentPart(tokens(document + 37 * n - 50), 0, f"d{n}") for n in range(_NUM_DOCUMENTS + 2)
    ]

    def parts(count: int = _NUM_DOCUMENTS) -> PromptParts:
        return (*draw.sample(documents, count), TextPart(tokens(_QUESTION)))

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
        yield RequestSpec(name, parts(), {"fuse": fuse})
    yield RequestSpec("reuse of one, twice", parts(1), {}, outputs=2)
    yield RequestSpec("text", (TextPart(tokens(3 * document // 2)),), {})
    choice = Select("quest", tokens=document, dense_below=0, dense_layers=(0,))
    yield RequestSpec("quest", parts(), {"select": choice})
    yield RequestSpec("quest, revised", parts(), {"select": choice, "revise": Revise(4)})
    window = Select("window", tokens=document, dense_below=0)
    yield RequestSpec("window", parts(), {"select": window})
    for policy in ("snapkv", "tova", "h2o"):
        evicting = Select(policy, tokens=document)
        yield RequestSpec(policy, (TextPart(tokens(3 * document // 2)),), {"select": evicting})
    fuse = fuses["random 60 %"]
    yield RequestSpec("random 60 %, quest", parts(), {"fuse": fuse, "select": choice})
    retrieval = Select("retrieval", ratio=1.0)
    yield RequestSpec("hosted", parts(1), {"select": retrieval}, hosted=True)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, by default of the command line."""
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
    status = Stress(options)()
    if fences is not None:
        print(fences.counts)
    return status


if __name__ == "__main__":
    raise SystemExit(main())

"""Requests drawn at random, many at a time, each answer against that of an engine which is asked
nothing else: finds what tests of chosen mixes do not think of.

    python -m tools.fuzz --minutes 5 --seed 1

A tiny random model in fp32 on a CPU. Prompts have leads, up to five documents (empty, shorter and
longer than a page, some twice, encoded alone or behind the lead), texts between them; policies of
blending, choosing, revising and throwing away, with their budgets; tokens are drawn or not, with
penalties, seeds and stop tokens; engines differ in pages, chunks, tiers, stored dtype and batch
invariance; some requests are aborted, and files of tiers flipped, cut and deleted. What is
compared: tokens, log-probabilities, reasons to end, errors, the number of documents that are
reported, and that an engine holds nothing when all is done. A difference is printed with what was
drawn; the same seed draws the same again. Exits with 1 if there is one."""

import argparse
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from looseleaf.bench.random_model import MODEL_SHAPES, random_engine, random_weights
from looseleaf.config import (
    CacheConfig,
    EngineConfig,
    Fuse,
    Revise,
    SchedulerConfig,
    Select,
    TierConfig,
)
from looseleaf.engine.engine import Engine
from looseleaf.engine.outputs import RequestOutput
from looseleaf.engine.pace import ComputePace
from looseleaf.engine.progress import RequestProgress
from looseleaf.engine.request import DocumentPart, Policies, PromptParts, Request, TextPart
from looseleaf.errors import InvalidOption, InvalidRequest
from looseleaf.models import Decoder
from looseleaf.sampling_params import SamplingParams
from looseleaf.tiers.disk import RECORD, DiskTier

_VOCAB = 400
_LENGTHS = (0, 1, 5, 15, 16, 17, 33, 64, 100, 160)
_TEXTS = (1, 3, 17, 30, 70)
_EVICTING = ("snapkv", "tova", "h2o")
_REVISED = ("quest", "representatives", "window")
# how far rounding may move a log-probability, and how close two tokens have to be for a tie; where
# keys are rounded to eight bits an order of sums may turn one of them over
_AWAY, _TIE = 3e-3, 2e-3
_EIGHT_BITS = 100
_NOBODY = 1 << 30


class Ask(NamedTuple):
    """One request; ``parts`` and the rest as `Request` has them."""

    parts: PromptParts
    params: SamplingParams
    policies: Policies
    salt: str

    def __str__(self) -> str:
        lengths = [(type(part).__name__, len(part.tokens)) for part in self.parts]
        return f"{lengths} {self.policies} {self.params}"


@dataclass(frozen=True)
class Kind:
    """What is drawn of an engine; ``tiers`` has h for the host's memory and d for a disk."""

    pages: int = 600
    chunk: int | None = None
    tiers: str = ""
    invariant: bool = False
    seqs: int = 8
    fp8: bool = False


class Drawing:
    """What is asked, and of what engines."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        lengths = [draw.choice(_LENGTHS) for _ in range(8)]
        self.documents = [
            DocumentPart(self.tokens(length), 0, f"d{n}") for n, length in enumerate(lengths)
        ]
        self.leads = [(), (TextPart(self.tokens(7)),), (TextPart(self.tokens(40)),)]
        self.texts = [self.tokens(length) for length in _TEXTS]

    def tokens(self, count: int) -> tuple[int, ...]:
        """So many tokens, none of them special."""
        return tuple(self.draw.choices(range(2, _VOCAB), k=count))

    def prompt(self) -> PromptParts:
        """A lead, documents with texts between some, a text; never two texts side by side."""
        draw, count = self.draw, self.draw.choice((0, 1, 2, 3, 5))
        twice = draw.random() < 0.5
        documents = draw.choices(self.documents, k=count) if twice else None
        lead = draw.choice(self.leads)
        context = draw.choice((0, sum(len(part.tokens) for part in lead)))
        drawn: list[DocumentPart | TextPart] = list(lead)
        for document in documents or draw.sample(self.documents, count):
            drawn.append(replace(document, context_length=context) if context else document)
            if draw.random() < 0.25:
                drawn.append(TextPart(draw.choice(self.texts)))
        text = draw.choice(self.texts)
        drawn.append(TextPart(text[: draw.randint(1, len(text))]))
        parts: list[DocumentPart | TextPart] = []
        for part in drawn:
            if parts and isinstance(part, TextPart) and isinstance(parts[-1], TextPart):
                parts[-1] = TextPart(parts[-1].tokens + part.tokens)
            else:
                parts.append(part)
        return tuple(parts)

    def params(self) -> SamplingParams:
        """How tokens are drawn, and when an output ends."""
        draw = self.draw
        sampled = draw.random() < 0.3
        return SamplingParams(
            temperature=draw.choice((0.7, 1.0)) if sampled else 0.0,
            seed=draw.randrange(1000) if sampled else None,
            n=draw.choice((1, 1, 3)) if sampled else 1,
            max_tokens=draw.choice((1, 2, 5, 20, 40)),
            ignore_eos=draw.random() < 0.5,
            logprobs=4,
            stop_token_ids=(draw.randrange(_VOCAB),) if draw.random() < 0.3 else (),
            repetition_penalty=draw.choice((1.0, 1.0, 1.3)),
            presence_penalty=draw.choice((0.0, 0.0, 0.5)),
            top_k=draw.choice((0, 0, 5)),
            top_p=draw.choice((1.0, 0.9)),
        )

    def policies(self) -> Policies:
        """What is blended, chosen and revised; nothing of what can't be put together."""
        told: dict[str, Any] = {}
        try:
            if self.draw.random() < 0.5:
                told["fuse"] = self._fuse()
            if self.draw.random() < 0.35:
                told |= self._select()
        except InvalidOption:
            pass
        return told  # type: ignore[return-value]

    def _fuse(self) -> Fuse:
        kinds = ("random", "first", "deviation", "question", "links", "all", "none", "ape")
        kind: Any = self.draw.choice(kinds)
        if kind in ("all", "none", "ape"):
            return Fuse(kind)
        if kind == "first":
            return Fuse("first", tokens=self.draw.choice((1, 8, 30)))
        if self.draw.random() < 0.5:
            return Fuse(kind, ratio=self.draw.choice((0.0, 0.1, 0.3, 0.7, 1.0)))
        return Fuse(kind, tokens=self.draw.choice((0, 1, 8, 50)))

    def _select(self) -> dict[str, Any]:
        kind: Any = self.draw.choice((*_REVISED, "partial", *_EVICTING))
        tokens = self.draw.choice((16, 48, 200))
        if kind in _EVICTING:
            return {"select": Select(kind, tokens=tokens)}
        layers = self.draw.choice(((), (0,)))
        select = Select(kind, tokens=tokens, dense_below=0, dense_layers=layers)
        if kind not in _REVISED or self.draw.random() < 0.5:
            return {"select": select}
        return {"select": select, "revise": Revise(self.draw.choice((1, 2, 4)))}

    def ask(self) -> Ask:
        """A request."""
        return Ask(self.prompt(), self.params(), self.policies(), self.draw.choice(("", "", "a")))

    def kind(self) -> Kind:
        """An engine."""
        draw = self.draw
        return Kind(
            pages=draw.choice((60, 90, 140, 400)),
            chunk=draw.choice((None, 16, 37, 64, 256)),
            tiers=draw.choice(("", "", "h", "d", "hd")),
            invariant=draw.random() < 0.2,
            seqs=draw.choice((2, 8)),
            fp8=draw.random() < 0.2,
        )


class Fuzz:
    """One run; ``found`` says what differed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.begun = options, time.perf_counter()
        self.drawing = Drawing(options.seed)
        model = replace(MODEL_SHAPES["tiny"], num_layers=3, vocab_size=_VOCAB)
        device = torch.device("cpu")
        self.decoder = Decoder(model, random_weights(model, torch.float32, device))
        self.right: dict[tuple[str, bool], RequestOutput | Exception] = {}
        self.found: list[str] = []
        self.engines = self.asked = self.refused = self.aborted = self.damaged = 0
        self.folder = ""

    def engine(self, kind: Kind) -> Engine:
        """An engine of a kind, over the model that all share."""
        tiers = TierConfig(
            host_gib=0.002 if "h" in kind.tiers else 0.0,
            disk_path=tempfile.mkdtemp(dir=self.folder) if "d" in kind.tiers else None,
            tier_timeout=30.0,
            staging_gib=0.01,
        )
        config = EngineConfig(
            device="cpu",
            max_model_len=1600,
            cache=CacheConfig(num_pages=kind.pages, kv_dtype="fp8" if kind.fp8 else "auto"),
            scheduler=SchedulerConfig(
                max_num_batched_tokens=kind.chunk,
                batch_invariant=kind.invariant,
                max_num_seqs=kind.seqs,
            ),
            tiers=tiers,
        )
        made = random_engine("tiny", config, torch.device("cpu"), self.decoder)
        if made.tiering.controller is not None:
            # of a pace that is not known a document is always loaded
            made.tiering.controller.pace = ComputePace()
        return made

    def add(self, engine: Engine, ask: Ask) -> RequestProgress:
        """Hand a request in; raises what the engine says to it."""
        self.asked += 1
        request = Request(f"r{self.asked}", ask.parts, ask.params, salt=ask.salt, **ask.policies)
        return engine.add(request)

    def answer(self, ask: Ask, fp8: bool) -> RequestOutput | Exception:
        """What an engine says that is asked nothing else."""
        key = f"{ask} {ask.salt} {ask.parts}", fp8
        if key not in self.right:
            engine = self.engine(Kind(fp8=fp8))
            try:
                progress = self.add(engine, ask)
                _run(engine)
                engine.check()
                self.right[key] = progress.error or progress.output()
            except (InvalidRequest, InvalidOption) as error:
                self.right[key] = error
            engine.close()
        return self.right[key]

    def round(self) -> None:
        """An engine, and some rounds of requests."""
        draw, kind = self.drawing.draw, self.drawing.kind()
        engine = self.engine(kind)
        self.engines += 1
        asks = [self.drawing.ask() for _ in range(draw.choice((2, 4, 6)))]
        for _ in range(draw.choice((1, 2, 4))):
            live = list(self._asked(engine, kind, draw.choices(asks, k=draw.choice((1, 3, 6)))))
            if live and draw.random() < 0.3:
                _run(engine, draw.choice((0, 1, 3)))
                _, progress = live.pop(draw.randrange(len(live)))
                if engine.knows(progress.request.request_id):
                    engine.abort(progress.request.request_id)
                    self.aborted += 1
            _run(engine)
            engine.check()
            for ask, progress in live:
                self._compare(kind, ask, progress)
            if draw.random() < 0.4:
                self._forget(engine)
            if draw.random() < 0.3:
                self._damage(engine)
        engine.close()

    def _asked(
        self, engine: Engine, kind: Kind, asks: Sequence[Ask]
    ) -> Iterator[tuple[Ask, RequestProgress]]:
        for ask in asks:
            try:
                yield ask, self.add(engine, ask)
            except (InvalidRequest, InvalidOption) as error:
                self.refused += 1
                # a small pool may have no room; whatever else is wrong is so everywhere
                here = "page" in str(error) or "pool" in str(error)
                if not here and not isinstance(self.answer(ask, kind.fp8), Exception):
                    self._say(kind, ask, f"refused here only: {error}")
                continue
            if self.drawing.draw.random() < 0.4:
                _run(engine, self.drawing.draw.choice((1, 2, 5)))

    def _forget(self, engine: Engine) -> None:
        """Have documents only in the tiers, if they came there."""
        if engine.tiers is not None and self.drawing.draw.random() < 0.7:
            engine.tiers.flush(30.0)
        engine.tiering.release_pages()
        engine.store.evict_idle()

    def _damage(self, engine: Engine) -> None:
        """Have some of the files of an engine's disk say something else, or nothing."""
        disks = engine.tiers.guards if engine.tiers is not None else ()
        for disk in (guard.tier for guard in disks if isinstance(guard.tier, DiskTier)):
            for path in sorted(disk.folder.glob(f"*{RECORD}")):
                if self.drawing.draw.random() < 0.5:
                    damage(path, self.drawing.draw)
                    self.damaged += 1

    def _compare(self, kind: Kind, ask: Ask, progress: RequestProgress) -> None:
        right = self.answer(ask, kind.fp8)
        if progress.error is not None or isinstance(right, Exception):
            known = repr(right if isinstance(right, Exception) else None)
            if "EngineFault" in repr(progress.error) or repr(progress.error)[:60] != known[:60]:
                self._say(kind, ask, f"{progress.error!r} for {known}")
            return
        output = progress.output()
        documents = sum(isinstance(part, DocumentPart) for part in ask.parts)
        told = len(output.reuse.documents)
        wrong = f"{told} documents of {documents}" if told != documents else None
        # what is drawn differs as soon as anything does
        slack = _EIGHT_BITS if kind.fp8 else 1
        wrong = wrong or differs(output, right, slack, drawn=kind.fp8 and not ask.params.greedy)
        if wrong is not None:
            self._say(kind, ask, wrong)

    def _say(self, kind: Kind, ask: Ask, what: str) -> None:
        self.found.append(f"{what} | {kind} | {ask}")
        print(self.found[-1], flush=True)

    def __call__(self) -> int:
        """Run; 1 if something was found."""
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as self.folder:
            while self.engines < self.options.rounds and self._seconds < 60 * self.options.minutes:
                self.round()
        print(
            f"seed {self.options.seed}: {self.engines} engines, {self.asked} requests "
            f"({self.refused} refused, {self.aborted} aborted), {self.damaged} files damaged, "
            f"{len(self.right)} answers known, {len(self.found)} differ; {self._seconds:.0f} s"
        )
        return 1 if self.found else 0

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self.begun


def damage(path: Path, draw: random.Random) -> None:
    """Flip a bit of a file, cut it, or delete it."""
    content = bytearray(path.read_bytes())
    kind = draw.choice(("flipped", "cut", "deleted"))
    if kind == "deleted" or not content:
        path.unlink()
        return
    place = draw.randrange(len(content))
    content[place] ^= 1 << draw.randrange(8)
    path.write_bytes(content if kind == "flipped" else content[:place])


def _run(engine: Engine, steps: int = _NOBODY) -> None:
    """Step until there is no work, or so many times."""
    while engine.has_work and steps:
        engine.step()
        steps -= 1


def differs(
    got: RequestOutput, right: RequestOutput, slack: float = 1, *, drawn: bool = False
) -> str | None:
    """How an answer differs by more than ``slack`` times rounding, None if it does not: up to the
    first token that is another one as likely, or for ``drawn`` ones any other."""
    for output, expected in zip(got.outputs, right.outputs, strict=True):
        for entries, known in zip(output.logprobs or (), expected.logprobs or (), strict=False):
            first, likely = entries[0], {entry.token_id: entry.logprob for entry in known}
            if first.token_id != known[0].token_id:
                away = abs(likely.get(first.token_id, -1e9) - known[0].logprob)
                if drawn or away < slack * _TIE:
                    break
                return f"{first} for {known[0]}"
            if abs(first.logprob - known[0].logprob) > slack * _AWAY:
                return f"{first} for {known[0]}"
        else:
            here, there = ((one.finish_reason, list(one.token_ids)) for one in (output, expected))
            if here != there:
                return f"{here} for {there}"
    return None


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What the tool takes."""
    parser = argparse.ArgumentParser(description="answers to mixes of requests drawn at random")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=_NOBODY, help="engines at most")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(Fuzz(parsed())())

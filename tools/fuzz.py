"""Requests drawn at random, many at a time, each answer against that of an engine which is asked
nothing else: finds what tests of chosen mixes do not think of.

    python -m tools.fuzz --minutes 5 --seed 1

A tiny random model in fp32 on a CPU, or with ``--device cuda`` one of 16 bits on a GPU, held
against the same in fp32 on a CPU: choices by scores may fall another way then, and are counted,
up to a tenth of them (`tools.fuzz_models`). Prompts have leads, up to five documents (empty,
shorter and longer than a page, some twice, encoded alone or behind the lead), texts between them,
or are a few tokens; policies of blending, choosing, revising and throwing away, with their budgets;
tokens are drawn or not, with penalties, seeds and stop tokens; engines differ in pages, chunks,
tiers, stored dtype and batch invariance. Some pools are so small that outputs are preempted. Some
requests are aborted; files of tiers are flipped, cut and deleted, values in Redis damaged, swapped
and replaced by those of other programs (`tools.fuzz_redis`). Tiers are slow or fail, and interrupts
come inside calls to them and while requests are admitted, after which all that was asked is
aborted, and the engine asked again. Half of the engines host documents outside of the pool
(`tools.fuzz_hosting`), are restarted, and host them again.

What is compared: tokens, log-probabilities, reasons to end, errors, the number of documents that
are reported, and that an engine holds nothing when all is done. A difference is printed with what
was drawn; the same seed draws the same again, though threads of tiers in trouble may meet in
another order. Exits with 1 if there is one.

`python -m tools.fuzz_text` draws hostile chat templates and tokenizers."""

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

import torch

from looseleaf.config import CacheConfig, EngineConfig, SchedulerConfig, TierConfig
from looseleaf.engine.engine import Engine
from looseleaf.engine.progress import RequestProgress
from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.engine.tiering.compute_time import ComputeTime
from looseleaf.errors import IntegrityError, InvalidOption, InvalidRequest
from looseleaf.prompt.request import DocumentPart, Request
from looseleaf.tiers import RemoteTier
from looseleaf.tiers.stores.disk import DiskTier
from looseleaf.tiers.stores.folder import RECORD
from looseleaf_lab.bench.random_model import random_engine
from tools.fuzz_answers import differs
from tools.fuzz_drawing import Ask, Drawing, Kind, chooses, is_plain
from tools.fuzz_hosting import (
    STILL_COMING,
    Hosted,
    Hosts,
    host_all,
    hosted_of,
    is_coming,
    read_of,
    refusals,
)
from tools.fuzz_models import gpu_model, tiny_model
from tools.fuzz_redis import RedisServer
from tools.fuzz_trouble import Interrupted, Trouble, damage, quiet

# by how much more where keys are rounded to eight bits, or found by an index
_EIGHT_BITS, _FOUND = 100, 10
# how many answers to requests that choose by scores of 16 bits may differ: some, and a share of all
_FEW_OTHERWISE, _SHARE_OTHERWISE = 3, 0.1
_NOBODY = 1 << 30


class Fuzz:
    """One run; ``found`` says what differed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.begun = options, time.perf_counter()
        self.drawing = Drawing(options.seed)
        device = torch.device(options.device)
        on_gpu = device.type == "cuda"
        self.model = gpu_model(options.seed, device) if on_gpu else tiny_model()
        self.right: dict[tuple[str, bool, tuple[Hosted, ...]], RequestOutput | Exception] = {}
        self.hosted_of: dict[str, tuple[Hosted, ...]] = {}
        self.found: list[str] = []
        self.engines = self.asked = self.refused = self.aborted = self.damaged = 0
        self.preempted = self.redis_damaged = self.redis_met = 0
        self.redis: RedisServer | None = None
        self.interrupted, self.came = 0, ""
        self.hosted = self.deleted = self.restarted = self.by_index = 0
        self.chose = self.otherwise = 0
        self.folder = ""

    def engine(self, kind: Kind, disk: str | None = None, *, alone: bool = False) -> Engine:
        """An engine of a kind, over the model that all share, and what it finds on a disk; one that
        is asked ``alone`` is on a CPU."""
        if disk is None and "d" in kind.tiers:
            disk = tempfile.mkdtemp(dir=self.folder)
        tiers = TierConfig(
            host_gib=0.002 if "h" in kind.tiers else 0.0,
            disk_path=disk,
            remote_url=self.redis.url if self.redis is not None and "r" in kind.tiers else None,
            tier_timeout=30.0,
            staging_gib=0.01,
        )
        decoder = self.model.alone if alone else self.model.decoder
        config = EngineConfig(
            device=str(decoder.device),
            max_model_len=1600,
            cuda_graphs=kind.graphs,
            cache=CacheConfig(num_pages=kind.pages, kv_dtype="fp8" if kind.fp8 else "auto"),
            scheduler=SchedulerConfig(
                max_num_batched_tokens=kind.chunk,
                batch_invariant=kind.invariant,
                max_num_seqs=kind.seqs,
            ),
            tiers=tiers,
        )
        made = random_engine("tiny", config, decoder.device, decoder)
        if made.tiering.controller is not None:
            # without a known compute time documents are always loaded
            made.tiering.controller.compute_time = ComputeTime()
        return made

    def add(self, engine: Engine, ask: Ask) -> RequestProgress:
        """Hand a request in; raises what the engine says to it."""
        self.asked += 1
        request = Request(f"r{self.asked}", ask.parts, ask.params, salt=ask.salt, **ask.policies)
        return engine.add(request)

    def answer(
        self, ask: Ask, fp8: bool, hosted: tuple[Hosted, ...] = ()
    ) -> RequestOutput | Exception:
        """What an engine says that is asked nothing else, and hosts so much."""
        key = f"{ask} {ask.salt} {ask.parts}", fp8, hosted
        if key not in self.right:
            engine = self.engine(Kind(fp8=fp8), alone=True)
            try:
                host_all(engine, hosted)
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
        if self.redis is not None:
            self.redis.empty()
        engine = self.engine(kind)
        self.engines, self.came = self.engines + 1, "not interrupted"
        trouble = Trouble(engine, kind.trouble, draw.randrange(1 << 30))
        hosts = Hosts(draw.randrange(1 << 30)) if kind.hosts else None
        make = self.drawing.long_ask if kind.tight else partial(self.drawing.ask, hosts=kind.hosts)
        asks = [make() for _ in range(6 if kind.tight else draw.choice((2, 4, 6)))]
        try:
            for _ in range(draw.choice((1, 2, 4))):
                asked = draw.choices(asks, k=6 if kind.tight else draw.choice((1, 3, 6)))
                for ask, progress in self._live(engine, kind, asked, trouble, hosts):
                    self._compare(kind, ask, progress)
                is_remote = "r" in kind.tiers
                if draw.random() < (0.8 if is_remote else 0.4):
                    self._forget(engine)
                if draw.random() < (0.8 if is_remote else 0.3):
                    self._damage(engine)
                if hosts is not None and draw.random() < 0.4:
                    engine = self._restart(engine, kind, hosts)
                    trouble = Trouble(engine, kind.trouble, draw.randrange(1 << 30))
        except IntegrityError as error:
            self._say(kind, None, f"{error!r}")
        self._end(engine)
        if hosts is not None:
            self.hosted, self.deleted = self.hosted + hosts.hosted, self.deleted + hosts.deleted

    def _restart(self, engine: Engine, kind: Kind, hosts: Hosts) -> Engine:
        """Another engine in place of one, on the same disk if there is one, that hosts as much."""
        self.restarted += 1
        self._end(engine)
        if "f" not in kind.trouble:
            hosts.check_disk(engine)
        made = self.engine(kind, engine.config.tiers.disk_path)
        hosts.again(made)
        return made

    def _end(self, engine: Engine) -> None:
        """Close an engine, and count its preemptions and the damage that it met in Redis."""
        self.preempted += engine.accounting.counters.preemptions
        engine.close()
        for guard in engine.tiers.guards if engine.tiers is not None else ():
            if isinstance(guard.tier, RemoteTier):
                self.redis_met += guard.counters.faults.get("damaged", 0)
                self.redis_met += guard.counters.faults.get("missing", 0)

    def _live(
        self,
        engine: Engine,
        kind: Kind,
        asked: Sequence[Ask],
        trouble: Trouble,
        hosts: Hosts | None,
    ) -> list[tuple[Ask, RequestProgress]]:
        """What is asked and neither refused nor aborted, when all of it has ended; nothing after an
        interrupt. The books balance then, and nobody holds a page."""
        live: list[tuple[Ask, RequestProgress]] = []
        try:
            with trouble:
                self._run_all(engine, kind, asked, live, hosts)
        except Interrupted as interrupt:
            # as `LLM.generate` does: nothing of the call stays behind
            self.interrupted, self.came = self.interrupted + 1, str(interrupt)
            for _, progress in live:
                engine.abort(progress.request.request_id)
            live = []
            _run(engine)
        engine.check()
        if hosts is not None:
            hosts.settle(engine)
        engine.tiering.release_pages()
        held = [segment for segment in engine.store.segments() if segment.references]
        if held:
            raise IntegrityError(f"{len(held)} segments are held by nobody")
        return live

    def _run_all(
        self,
        engine: Engine,
        kind: Kind,
        asked: Sequence[Ask],
        live: list[tuple[Ask, RequestProgress]],
        hosts: Hosts | None,
    ) -> None:
        """Run what is asked; ``live`` has what was not refused, less one that is aborted."""
        draw = self.drawing.draw
        if hosts is not None:
            hosts.change(engine, asked)
            if draw.random() < 0.7:
                _run(engine)
                hosts.settle(engine)
        for pair in self._asked(engine, kind, asked):
            live.append(pair)
            if hosts is not None and draw.random() < 0.3:
                hosts.change(engine, asked)
            if draw.random() < 0.4:
                _run(engine, draw.choice((1, 2, 5)))
        if live and draw.random() < 0.3:
            _run(engine, draw.choice((0, 1, 3)))
            _, progress = live.pop(draw.randrange(len(live)))
            if engine.knows(progress.request.request_id):
                engine.abort(progress.request.request_id)
                self.aborted += 1
        _run(engine)

    def _asked(
        self, engine: Engine, kind: Kind, asks: Sequence[Ask]
    ) -> Iterator[tuple[Ask, RequestProgress]]:
        for ask in asks:
            before, coming = hosted_of(engine, ask), is_coming(engine, ask)
            try:
                progress = self.add(engine, ask)
            except (InvalidRequest, InvalidOption) as error:
                self.refused += 1
                self._check_refusal(kind, ask, error, before, coming=coming)
                continue
            hosted = read_of(ask, progress)
            if refusals(ask, hosted):
                self._say(kind, ask, f"not refused, with {hosted}")
            self.hosted_of[progress.request.request_id] = hosted
            self.by_index += bool(hosted)
            yield ask, progress

    def _check_refusal(
        self, kind: Kind, ask: Ask, error: Exception, hosted: tuple[Hosted, ...], *, coming: bool
    ) -> None:
        """Say so if a request should not have been refused, or for another reason."""
        told, right = str(error), refusals(ask, hosted)
        if any(reason in told for reason in right):
            if STILL_COMING in told and not coming:
                self._say(kind, ask, f"refused, though {coming=}: {error}")
            return
        # a small pool may have no room; whatever else is wrong is so everywhere
        here = "page" in told or "pool" in told
        if not here and not isinstance(self.answer(ask, kind.fp8, hosted), Exception):
            self._say(kind, ask, f"refused here only: {error}")

    def _forget(self, engine: Engine) -> None:
        """Have documents only in the tiers, if they came there."""
        if engine.tiers is not None and self.drawing.draw.random() < 0.7:
            engine.tiers.flush(30.0)
        engine.tiering.release_pages()
        engine.store.evict_idle()

    def _damage(self, engine: Engine) -> None:
        """Have files of an engine's disk, and values of Redis, say something else, or nothing."""
        if self.redis is not None:
            self.redis_damaged += self.redis.damage(self.drawing.draw)
        guards = engine.tiers.guards if engine.tiers is not None else ()
        tiers = [*(guard.tier for guard in guards), engine.hosting.tier]
        for disk in (tier for tier in tiers if isinstance(tier, DiskTier)):
            for path in sorted((*disk.folder.glob(f"*{RECORD}"), *disk.folder.glob("*.sidecar"))):
                # the writer's thread may make room meanwhile
                with suppress(FileNotFoundError):
                    if self.drawing.draw.random() < 0.5:
                        damage(path, self.drawing.draw)
                        self.damaged += 1

    def _compare(self, kind: Kind, ask: Ask, progress: RequestProgress) -> None:
        hosted = self.hosted_of.pop(progress.request.request_id)
        right = self.answer(ask, kind.fp8, hosted)
        if progress.error is not None or isinstance(right, Exception):
            known = repr(right if isinstance(right, Exception) else None)
            if "EngineFault" in repr(progress.error) or repr(progress.error)[:60] != known[:60]:
                self._say(kind, ask, f"{progress.error!r} for {known}")
            return
        output = progress.output()
        documents = sum(isinstance(part, DocumentPart) for part in ask.parts)
        told = len(output.reuse.documents)
        wrong = f"{told} documents of {documents}" if told != documents else None
        slack = max(self.model.slack, _EIGHT_BITS if kind.fp8 else _FOUND if hosted else 1)
        # log-probabilities do not tell ties of what is drawn, or chosen behind penalties
        any_tie = slack > 1 and not (ask.params.greedy and is_plain(ask.params))
        wrong = wrong or differs(output, right, slack, any_tie=any_tie)
        by_scores = self.model.slack > 1 and chooses(ask.policies)
        self.chose += by_scores
        if wrong is not None and by_scores:
            # of scores of 16 bits another may be the largest
            self.otherwise += 1
        elif wrong is not None:
            self._say(kind, ask, wrong)

    def _say(self, kind: Kind, ask: Ask | None, what: str) -> None:
        self.found.append(f"{what} | {kind} | {self.came} | {ask}")
        print(self.found[-1], flush=True)

    def __call__(self) -> int:
        """Run; 1 if something was found."""
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as self.folder:
            self.redis = RedisServer.start()
            try:
                while self.engines < self.options.rounds and self._is_in_time:
                    self.round()
            finally:
                if self.redis is not None:
                    self.redis.close()
        if self.otherwise > _FEW_OTHERWISE + _SHARE_OTHERWISE * self.chose:
            self.found.append(f"{self.otherwise} of {self.chose} chose otherwise")
        print(
            f"seed {self.options.seed}: {self.engines} engines, {self.asked} requests "
            f"({self.refused} refused, {self.aborted} aborted), {self.damaged} files damaged, "
            f"{self._redis_line}, {self.preempted} preemptions, "
            f"{self.interrupted} interrupts, {self.hosted} documents hosted "
            f"({self.deleted} deleted, {self.restarted} restarts), "
            f"{self.by_index} requests read them, "
            f"{len(self.right)} answers known, {self.otherwise} of {self.chose} chose otherwise, "
            f"{len(self.found)} differ; {self._seconds:.0f} s; {self.model.name}"
        )
        return 1 if self.found else 0

    @property
    def _redis_line(self) -> str:
        if self.redis is None:
            return "no Redis server is installed"
        return f"{self.redis_damaged} Redis values damaged and {self.redis_met} met"

    @property
    def _is_in_time(self) -> bool:
        return bool(self._seconds < 60 * self.options.minutes)

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self.begun


def _run(engine: Engine, steps: int = _NOBODY) -> None:
    """Step until there is no work, or so many times."""
    while engine.has_work and steps:
        engine.step()
        steps -= 1


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What the tool takes."""
    parser = argparse.ArgumentParser(
        description="answers to mixes of requests drawn at random",
        epilog="python -m tools.fuzz_text draws hostile chat templates and tokenizers",
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=_NOBODY, help="engines at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    quiet()
    raise SystemExit(Fuzz(parsed())())

"""Documents that `tools.fuzz` has engines host: registered with indexes of every kind, under one or
two system texts, asked for again, and deleted, while requests run. What is refused has to be
refused as documented, and what is deleted must be nowhere."""

import random
import time
from collections.abc import Iterable
from collections.abc import Sequence as Several
from typing import Any, NamedTuple

from looseleaf.config import IndexConfig
from looseleaf.engine.documents.host_prefill import HostingJob
from looseleaf.engine.documents.host_store import stored_key
from looseleaf.engine.engine import Engine
from looseleaf.engine.progress import RequestProgress
from looseleaf.engine.sequence import Sequence
from looseleaf.errors import IntegrityError, InvalidRequest
from looseleaf.index.host.segment import HostedSegment
from looseleaf.kv.keys import SegmentKey
from looseleaf.prompt.request import Document, DocumentPart, PromptParts, Request, TextPart
from looseleaf.sampling_params import SamplingParams
from looseleaf.tiers.stores.disk import DiskTier
from tools.fuzz_drawing import Ask

_NOT_HOSTED = "none of this request's documents is hosted"
STILL_COMING = "is still being hosted"
_SECONDS = 60.0


class Hosted(NamedTuple):
    """A document that is hosted, or is to be."""

    parts: PromptParts
    salt: str
    config: IndexConfig


def is_retrieval(ask: Ask) -> bool:
    """Whether hosted documents make a difference to a request."""
    select = ask.policies.get("select")
    return select is not None and select.policy == "retrieval"


def behind_its_lead(ask: Ask, part: DocumentPart) -> PromptParts:
    """A document of a prompt as `PromptBuilder.from_document` has it."""
    seen = ask.parts[0].tokens[: part.context_length]
    return (*((TextPart(seen),) if seen else ()), part, TextPart(()))


def keys_of(engine: Engine, parts: PromptParts, salt: str) -> list[SegmentKey]:
    """The keys of a prompt's documents, in order."""
    request = Request("(keys)", parts, SamplingParams(max_tokens=1), salt, warms=True)
    page_size = engine.store.pool.page_size
    return [use.key for use in Sequence(request, 0, engine.hosting.keys, page_size).documents]


def hosted_of(engine: Engine, ask: Ask) -> tuple[Hosted, ...]:
    """What an engine hosts of a request's documents now, if that makes a difference."""
    if not is_retrieval(ask):
        return ()
    documents = [part for part in ask.parts if isinstance(part, DocumentPart)]
    found = map(engine.hosting.find, keys_of(engine, ask.parts, ask.salt))
    return _named(ask, zip(documents, found, strict=True))


def read_of(ask: Ask, progress: RequestProgress) -> tuple[Hosted, ...]:
    """What a request reads of hosted documents. Raises IntegrityError if its outputs differ."""
    reads = {
        _named(ask, ((use.part, use.segment) for use in output.sequence.hosted))
        for output in progress.outputs
    }
    if len(reads) > 1:
        raise IntegrityError(f"outputs of a request read {reads}")
    return reads.pop()


def _named(
    ask: Ask, found: Iterable[tuple[DocumentPart, HostedSegment | None]]
) -> tuple[Hosted, ...]:
    named = [
        Hosted(behind_its_lead(ask, part), ask.salt, segment.index.config)
        for part, segment in found
        if segment is not None and segment.index is not None
    ]
    return tuple(dict.fromkeys(named))


def is_coming(engine: Engine, ask: Ask) -> bool:
    """Whether one of a request's documents is being hosted."""
    return any(map(engine.hosting.is_coming, keys_of(engine, ask.parts, ask.salt)))


def refusals(ask: Ask, hosted: Several[Hosted]) -> tuple[str, ...]:
    """How a request has to be refused if an engine hosts so much: one of these; none if it must
    not be, as far as hosting goes."""
    fuse = ask.policies.get("fuse")
    if not is_retrieval(ask):
        return ()
    if fuse is not None and fuse.selector != "none":
        return ("fuse can't be combined with select='retrieval'",)
    if not hosted:
        return _NOT_HOSTED, STILL_COMING
    if ask.policies.get("revise") is not None and any(one.config.estimate for one in hosted):
        return ("revise can't be combined with an index that estimates",)
    return ()


def host_all(engine: Engine, hosted: Several[Hosted]) -> None:
    """Host documents, and be done."""
    for one in hosted:
        job = engine.hosting.add(*one)
        _finish(engine, job)
        if job.error is not None:
            raise IntegrityError(f"a document is not hosted: {job.error!r}")


def _finish(engine: Engine, job: HostingJob) -> None:
    """Step and wait until a document is hosted or has failed; raises IntegrityError if it hangs."""
    until = time.perf_counter() + _SECONDS
    while not job.finished.is_set():
        if engine.has_work:
            engine.step()
        # a thread may find that something is to be computed after all
        elif not job.finished.wait(0.01) and time.perf_counter() > until:
            raise IntegrityError(f"hosting hangs: {job.stage}")


class Hosts:
    """The hosted documents of engines that follow each other on one disk."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        # by salt and id, then by key, as documents have it; the latest last
        self._known: dict[tuple[str, str], dict[SegmentKey, Hosted]] = {}
        # what a key may be hosted as: two ids may have the same text, and a registration that was
        # interrupted may have come as far as to host
        self._latest: dict[SegmentKey, tuple[IndexConfig, ...]] = {}
        self.hosted = self.deleted = 0

    def change(self, engine: Engine, asks: Several[Ask]) -> None:
        """Register documents of what is asked, or delete some."""
        draw = self._draw
        for _ in range(draw.choice((2, 4, 6))):
            ask = draw.choice(asks)
            # who makes a `Document` of no text is refused
            documents = [p for p in ask.parts if isinstance(p, DocumentPart) and p.tokens]
            if documents:
                part = draw.choice(documents)
                self._register(
                    engine, part.name, Hosted(behind_its_lead(ask, part), ask.salt, self._index())
                )
        if self._known and draw.random() < 0.25:
            self._delete(engine, *draw.choice(sorted(self._known)))

    def again(self, engine: Engine) -> None:
        """Register all that is known, as after a restart."""
        for (_, name), several in self._known.items():
            for one in list(several.values()):
                self._register(engine, name, one)

    def settle(self, engine: Engine) -> None:
        """Wait until all is hosted; raises IntegrityError if something is not, or is not as it was
        asked for last."""
        for (salt, name), several in self._known.items():
            for key in several:
                # a thread may be about to end it: then all of that, or nothing
                with engine.hosting._lock:
                    job = engine.hosting._jobs.get(key)
                if job is not None:
                    _finish(engine, job)
                segment = engine.hosting.find(key)
                index = segment.index if segment is not None else None
                if index is None or index.config not in self._latest[key]:
                    failure = engine.documents.failure(name, salt)
                    raise IntegrityError(
                        f"{name} is hosted as {index and index.config}, not as "
                        f"{self._latest[key]}: {failure!r}"
                    )
            if (state := engine.documents.stat(name, salt).state) != "ready":
                raise IntegrityError(f"{name} is hosted, and told to be {state}")

    def _register(self, engine: Engine, name: str, one: Hosted) -> None:
        (key,) = keys_of(engine, one.parts, one.salt)
        coming = engine.hosting._jobs.get(key)
        other = coming is not None and coming.config != one.config
        about, before = (Document(name), one.parts, name, one.salt), self._latest.get(key, ())
        self._latest[key] = *before, one.config
        try:
            engine.documents.register(*about, hosted=one.config)
        except InvalidRequest as error:
            self._latest[key] = before
            if not other or "is being hosted with another index" not in str(error):
                raise IntegrityError(f"{name} can't be hosted: {error!r}") from error
            return
        if other and engine.hosting._jobs.get(key) is coming:
            raise IntegrityError(f"{name} is hosted with two indexes at a time")
        self.hosted += 1
        self._known.setdefault((one.salt, name), {})[key] = one
        self._latest[key] = (one.config,)
        try:
            engine.documents.register(*about, hosted=one.config, pinned=True)
        except InvalidRequest as error:
            if "has no pages to pin" in str(error):
                return
        raise IntegrityError(f"{name} is hosted and pinned")

    def _delete(self, engine: Engine, salt: str, name: str) -> None:
        engine.documents.delete(name, salt)
        self.deleted += 1
        for key in self._known.pop((salt, name)):
            if any(key in several for several in self._known.values()):
                continue
            if engine.hosting.find(key) is not None or engine.hosting.is_coming(key):
                raise IntegrityError(f"{name} is deleted, and hosted")

    def check_disk(self, engine: Engine) -> None:
        """Raise IntegrityError if a closed engine's disk has a document that was deleted."""
        disk = engine.hosting.tier
        if not isinstance(disk, DiskTier):
            return
        names = {stored_key(key) for several in self._known.values() for key in several}
        stray = [entry for entry in disk.entries() if entry.key not in names]
        if stray:
            raise IntegrityError(f"{len(stray)} hosted documents are on disk for nobody")

    def _index(self) -> IndexConfig:
        draw = self._draw
        kind: Any = draw.choice(("flat", "ivf", "graph"))
        sink, local = draw.choice(((0, 0), (4, 12), (16, 64)))
        return IndexConfig(
            kind,
            per=draw.choice(("kv_head", "kv_head", "query_head")),
            keys=draw.choice(("stored", "stored", "int8")),
            sink=sink,
            local=local,
            top=20,
            degree=8,
            cluster_size=8,
            span=64,
            estimate=kind == "ivf" and draw.random() < 0.3,
        )

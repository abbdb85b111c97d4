"""Host-resident documents: computed once into host memory, indexed, and never in the pool.

Such a document may be longer than the pool. The engine's steps compute it chunk by chunk beside
requests. A separate thread builds its index, so that no request waits. With a tier both are stored,
and a new process loads them."""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import torch

from looseleaf.attention.paged import PagedAttention
from looseleaf.config import EngineConfig, IndexConfig
from looseleaf.engine.background import Enlist
from looseleaf.engine.documents.host_prefill import LEARNING, HostedPass, HostingJob
from looseleaf.engine.documents.host_store import is_stored, load, store, stored_key
from looseleaf.engine.runner.runner import OnProgress, Runner
from looseleaf.engine.sequence import Sequence
from looseleaf.errors import EngineFault, InvalidRequest
from looseleaf.index import Heads, build_segment
from looseleaf.index.host.attend import HostedCounters
from looseleaf.index.host.segment import HostedSegment
from looseleaf.kv.keys import KeySpace, SegmentKey
from looseleaf.models import Decoder
from looseleaf.parallel import Link, Ranks
from looseleaf.parallel.ranks import command
from looseleaf.prompt.request import PromptParts, Request
from looseleaf.sampling_params import SamplingParams
from looseleaf.tiers import HOSTED, DiskTier, Ledger, TierFault
from looseleaf.tiers.ending import join_all

# indexes that are built at a time where a GPU compares: one is compared, others are joined up
_WORKERS = 4
_ENDING_SECONDS = 30.0
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Indexing:
    """The indexing jobs of an engine and their threads, without a reference to the engine."""

    jobs: Mapping[SegmentKey, HostingJob]
    threads: list[threading.Thread]

    def close(self) -> None:
        """End each thread after its current index; finished indexes stay on disk."""
        for job in list(self.jobs.values()):
            if job.stage in ("loading", "indexing"):
                job.stage = "forgotten"
        join_all(self.threads, _ENDING_SECONDS)


@dataclass(eq=False)
class Hosting:
    """The host-resident documents of an engine. Only `find` and a job's event are thread-safe.

    ``folder`` stores finished parts of indexes, from which an interrupted build continues. ``tier``
    stores documents with their index. ``wake`` is called when a document is ready; ``enlist`` makes
    the engine call `step` between steps."""

    model: Decoder
    attention: PagedAttention
    keys: KeySpace
    chunk_tokens: int
    tier: DiskTier | None = None
    folder: Path | None = None
    wake: Callable[[], None] = lambda: None
    enlist: Enlist = lambda work: None
    ranks: Ranks | None = None
    loaded: int = 0
    built: int = 0
    _segments: dict[SegmentKey, HostedSegment] = field(default_factory=dict)
    _jobs: dict[SegmentKey, HostingJob] = field(default_factory=dict)
    _threads: list[threading.Thread] = field(default_factory=list)
    # a document may be forgotten at the moment at which its index is built
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def create(cls, runner: Runner, keys: KeySpace, config: EngineConfig) -> "Hosting":
        """The hosting of an engine, without documents.

        With a ``disk_path`` its folder ``hosted`` stores at most ``disk_gib`` of documents. An
        unusable folder is logged; documents are then computed again at the next start."""
        on_gpu = runner.model.device.type == "cuda"
        hosting = cls(
            runner.model,
            runner.attention,
            keys,
            config.batched_tokens(on_gpu),
            ranks=runner.model.ranks,
        )
        tiers = config.tiers
        # ranks compute host-resident documents together, so none loads one alone
        if tiers.disk_path is not None and hosting.ranks is None:
            root = Path(tiers.disk_path).expanduser() / HOSTED
            try:
                num_bytes = int(tiers.disk_gib * 2**30)
                ledger = Ledger(num_bytes, tiers.tier_ttl, tiers.tenant_share)
                hosting.tier = DiskTier(root, ledger)
                hosting.folder = root / "indexing"
            except TierFault as error:
                _log.warning("hosted documents are not kept on disk: %s", error)
        return hosting

    @property
    def indexing(self) -> Indexing:
        """The current and future indexing jobs."""
        return Indexing(self._jobs, self._threads)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute."""
        return any(job.stage == "computing" for job in list(self._jobs.values()))

    @property
    def is_done(self) -> bool:
        """Whether all jobs have ended."""
        return not self._jobs

    @property
    def counters(self) -> HostedCounters | None:
        """The counters of reads; None if the attention can't read host memory."""
        hosted = self.attention.hosted
        return None if hosted is None else replace(hosted.counters)

    def find(self, key: SegmentKey) -> HostedSegment | None:
        """The document of ``key`` if it is computed and indexed.

        With several ranks only the engine's thread may call this."""
        if self.ranks is None:
            return self._segments.get(key)
        return self._find_on_all(key, self.ranks.link)

    def _find_on_all(self, key: SegmentKey, link: Link) -> HostedSegment | None:
        """`find` on rank 0; other ranks wait for their own index."""
        if not link.decide("hosted", lambda: key in self._segments):
            return None
        job = self._jobs.get(key)
        if job is not None:
            job.finished.wait()
        if key not in self._segments:
            raise EngineFault("a host-resident document has no index on a rank: register it again")
        return self._segments[key]

    def is_coming(self, key: SegmentKey) -> bool:
        """Whether a job computes the document of ``key`` for the first time."""
        is_coming = key in self._jobs and key not in self._segments
        if self.ranks is None:
            return is_coming
        return self.ranks.link.decide("hosted soon", lambda: is_coming)

    @command("hosting.forget")
    def forget(self, key: SegmentKey) -> bool:
        """Drop a document and its job from memory and tier; returns whether it was ready.

        Requests that read it continue."""
        with self._lock:
            job, segment = self._jobs.pop(key, None), self._segments.pop(key, None)
        if job is not None:
            job.stage, job.pass_over = "forgotten", None
            job.finished.set()
        self._discard(key)
        hosted = self.attention.hosted
        if segment is not None and hosted is not None:
            hosted.forget(segment)
        return segment is not None

    def add(
        self,
        parts: PromptParts,
        salt: str,
        config: IndexConfig,
        on_progress: OnProgress | None = None,
        *,
        beside: bool = False,
    ) -> HostingJob:
        """Start the job of the document of ``parts`` (`PromptBuilder.from_document`).

        A document in the tier is loaded immediately, or with ``beside`` by a thread. Raises
        InvalidRequest if it exceeds the model's positions, if the model's scores are not plain
        inner products, if no kernel reads host memory, or if a job with another index runs."""
        if self.ranks is None:
            return self._add(parts, salt, config, on_progress, beside=beside)
        with self.ranks.link.command("hosting.add", parts, salt, config, beside=beside):
            return self._add(parts, salt, config, on_progress, beside=beside)

    def _add(
        self,
        parts: PromptParts,
        salt: str,
        config: IndexConfig,
        on_progress: OnProgress | None,
        *,
        beside: bool,
    ) -> HostingJob:
        """`add` on this rank."""
        page_size = self.attention.pool.page_size
        request = Request("(hosted)", parts, SamplingParams(max_tokens=1), salt, warms=True)
        sequence = Sequence(request, 0, self.keys, page_size)
        (use,) = sequence.documents
        key, tokens = use.key, use.tokens
        lead = sequence.lead.tokens if sequence.lead else []
        context = tuple(lead[: use.part.context_length])
        self._require_readable(len(context) + len(tokens))
        if (coming := self._jobs.get(key)) is not None:
            if coming.config == config or coming.num_callers:
                return self._ask_again(coming, config, on_progress)
            # an interrupted call left this job without waiting callers
            self._drop(coming)
        segment = self._room(key, len(tokens), config)
        job = HostingJob(segment, context, tokens, config, on_progress, tenant=sequence.tenant)
        stored = segment.index is None and not segment.filled and is_stored(self.tier, key)
        if segment.index is not None or (stored and not beside and self._load(segment, config)):
            job.stage = "ready"
            job.stored = is_stored(self.tier, key) if self.tier is not None else None
            self._segments[key] = segment
            job.finished.set()
            return job
        if stored and beside:
            job.stage = "loading"
        elif segment.ready:
            job.stage = "indexing"
        else:
            job.pass_over = self._make_pass(job)
        self.enlist(self)
        # visible to `step` and to repeated calls only when it is complete
        self._jobs[key] = job
        self._begin_beside(job)
        job.num_callers += 1
        return job

    def _ask_again(
        self, job: HostingJob, config: IndexConfig, on_progress: OnProgress | None
    ) -> HostingJob:
        """The running job, for one more caller; continues a job that an interrupt has stopped."""
        _require_same(job.config, config)
        if not job.num_callers:
            job.on_progress = on_progress
        self._begin_beside(job)
        job.num_callers += 1
        return job

    def _drop(self, job: HostingJob) -> None:
        """End a job; a ready document stays."""
        with self._lock:
            if self._jobs.get(job.segment.key) is job:
                del self._jobs[job.segment.key]
        job.stage, job.pass_over = "forgotten", None
        job.finished.set()

    def _make_pass(self, job: HostingJob) -> HostedPass:
        return HostedPass(self.model.config, self.attention.rotations, self.attention.rules, job)

    def _bring(self, job: HostingJob) -> None:
        """Load a document in a thread, then compute or index the parts that the tier lacks."""
        try:
            if self._load(job.segment, job.config):
                self._end(job, None, loaded=True)
                return
            pass_over = None if job.segment.ready else self._make_pass(job)
        except Exception as error:
            self._end(job, error)
            return
        with self._lock:
            if self._jobs.get(job.segment.key) is not job or job.stage == "forgotten":
                return
            job.pass_over = pass_over
            job.stage = "indexing" if pass_over is None else "computing"
        if job.stage == "indexing":
            self._index(job)
        self.wake()

    def _room(self, key: SegmentKey, num_tokens: int, config: IndexConfig) -> HostedSegment:
        """The document with this index if it is ready, else a new segment.

        The new segment has the known keys and values, unless the index learns from queries."""
        known, shape = self._segments.get(key), self.model.config
        if known is not None and known.index is not None and known.index.config == config:
            return known
        if known is not None and config.kind not in LEARNING:
            return HostedSegment(key, num_tokens, known.kv, filled=num_tokens)
        return HostedSegment.empty(
            key,
            num_tokens,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            planes=shape.kv_planes,
            dtype=self.model.dtype,
        )

    def step(self) -> None:
        """Compute a chunk of the oldest document that is not computed; a fault ends its job."""
        job = next((job for job in list(self._jobs.values()) if job.stage == "computing"), None)
        if job is None or job.pass_over is None:
            return
        try:
            # an interrupt of `on_progress` may leave a complete document in this stage
            if not job.segment.ready:
                job.pass_over.advance(self.model, self.chunk_tokens)
                job.tell(job.segment.filled, job.segment.num_tokens)
        except Exception as error:
            self._end(job, error)
            return
        if job.segment.ready and job.stage == "computing":
            self._begin_index(job)

    def _begin_index(self, job: HostingJob) -> None:
        job.stage, job.pass_over = "indexing", None
        self._begin(job, self._index)

    def _begin_beside(self, job: HostingJob) -> None:
        """Start the thread of a job, unless it runs."""
        if job.thread is not None and job.thread.is_alive():
            return
        # checked second, because a thread that has ended no longer changes the stage
        if job.stage in ("loading", "indexing"):
            self._begin(job, self._bring if job.stage == "loading" else self._index)

    def _begin(self, job: HostingJob, act: Callable[[HostingJob], None]) -> None:
        job.thread = thread = threading.Thread(
            target=self._beside, args=(act, job), name="looseleaf-indexing", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            # the system has no more threads
            self._end(job, error)
        finally:
            # also after an interrupt, which may come when the thread runs
            both = (*self._threads, thread)
            self._threads[:] = filter(threading.Thread.is_alive, both)

    def _beside(self, act: Callable[[HostingJob], None], job: HostingJob) -> None:
        """Call ``act`` in a thread, which has the first GPU by default."""
        if self.model.device.type == "cuda":
            torch.cuda.set_device(self.model.device)
        act(job)

    def _index(self, job: HostingJob) -> None:
        segment, shape = job.segment, self.model.config
        heads = Heads(shape.num_layers, shape.num_qo_heads, shape.num_kv_heads)
        folder = None if self.folder is None else self.folder / segment.key.hex()
        device = self.model.device
        try:
            segment.index = build_segment(
                segment, segment.num_tokens, heads, job.config, folder=folder,
                on_progress=job.tell, device=device,
                workers=_WORKERS if device.type == "cuda" else 1,
            )  # fmt: skip
            segment.queries_of = []
            self.built += 1
            job.stored = store(self.tier, job)
            # after a deletion the folder may belong to a new job
            if folder is not None and self._jobs.get(segment.key) is job:
                shutil.rmtree(folder, ignore_errors=True)
        except Exception as error:
            self._end(job, error)
            return
        self._end(job, None)

    def _end(self, job: HostingJob, error: Exception | None, *, loaded: bool = False) -> None:
        key = job.segment.key
        with self._lock:
            is_current = self._jobs.get(key) is job
            in_use = key in self._jobs or key in self._segments
            if is_current:
                if error is not None:
                    # before the job's removal, because it may take long
                    job.let_go()
                del self._jobs[key]
                job.error, job.stage = error, "failed" if error else "ready"
                if error is None:
                    self._segments[key] = job.segment
                    job.seconds = None if loaded else time.perf_counter() - job.began
                    job.stored = True if loaded else job.stored
                # under the lock: a ready document must not have a running job
                job.finished.set()
        if is_current:
            self.wake()
        elif not in_use:
            # deleted while it was stored
            self._discard(key)

    def _load(self, segment: HostedSegment, config: IndexConfig) -> bool:
        loaded = load(self.tier, segment, config)
        self.loaded += loaded
        return loaded

    def _discard(self, key: SegmentKey) -> None:
        """Delete a document from the disk."""
        try:
            if self.tier is not None:
                self.tier.delete([stored_key(key)])
        except TierFault as error:
            _log.warning("a hosted document was not deleted from disk: %s", error)
        if self.folder is not None:
            shutil.rmtree(self.folder / key.hex(), ignore_errors=True)

    def _require_readable(self, num_tokens: int) -> None:
        attention = self.attention
        if attention.hosted is None:
            raise InvalidRequest(
                "hosted documents are read by the attention of a CPU or of a CUDA device: leave "
                "the implementation to 'auto', or register the document for the pool"
            )
        most = attention.num_positions
        if num_tokens >= most:
            raise InvalidRequest(
                f"the document and what it sees have {num_tokens} tokens, and the context holds "
                f"{most}: shorten it, or raise max_model_len",
                "max_model_len",
            )
        if any(r.window or r.soft_cap or r.alibi_slopes is not None for r in attention.rules):
            raise InvalidRequest(
                "an index finds keys by plain inner products: models with sliding windows, capped "
                "scores or ALiBi can't read hosted documents"
            )


def _require_same(pending: IndexConfig, config: IndexConfig) -> None:
    """Raise InvalidRequest if ``config`` differs from the index that is in progress."""
    if pending == config:
        return
    differ = {f.name: (getattr(pending, f.name), getattr(config, f.name)) for f in fields(pending)}
    changes = "; ".join(f"{name} {a!r}, not {b!r}" for name, (a, b) in differ.items() if a != b)
    raise InvalidRequest(
        f"the document is being hosted with another index ({changes}): wait until that is there, "
        "then host it with this one"
    )

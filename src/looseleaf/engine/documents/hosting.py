"""Documents that are hosted: computed once into the host's memory, indexed, and never in the pool.

A hosted document may be longer than the pool. It is computed chunk by chunk in the engine's steps,
beside the requests; its index is built on a thread of its own, since that takes longest and no
request must wait for it. With a tier both are stored, and a new process takes them from there."""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from looseleaf.attention.host.attend import HostedCounters
from looseleaf.attention.paged import PagedAttention
from looseleaf.config import EngineConfig, IndexConfig
from looseleaf.engine.background import Enlist
from looseleaf.engine.documents.host_prefill import LEARNING, HostedPass, HostingJob
from looseleaf.engine.documents.host_store import is_stored, load, store, stored_key
from looseleaf.engine.runner.runner import OnProgress, Runner
from looseleaf.engine.sequence import Sequence
from looseleaf.errors import InvalidRequest
from looseleaf.index import Heads, build_segment
from looseleaf.kv.hosted import HostedSegment
from looseleaf.kv.keys import KeySpace, SegmentKey
from looseleaf.models import Decoder
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
    """What an engine is indexing, and the threads that do. It knows nothing of the engine, so that
    it may outlive it."""

    jobs: Mapping[SegmentKey, HostingJob]
    threads: list[threading.Thread]

    def close(self) -> None:
        """End the threads, each behind the index that it is at; finished ones are kept on disk."""
        for job in list(self.jobs.values()):
            if job.stage in ("loading", "indexing"):
                job.stage = "forgotten"
        join_all(self.threads, _ENDING_SECONDS)


@dataclass(eq=False)
class Hosting:
    """The hosted documents of an engine. Only `find` and a job's event are for any thread.

    ``folder`` keeps finished parts of indexes, so that a build that was killed goes on; ``tier``
    keeps whole documents with their index. ``wake`` is called when a document is ready; ``enlist``
    has `step` called before steps."""

    model: Decoder
    attention: PagedAttention
    keys: KeySpace
    chunk_tokens: int
    tier: DiskTier | None = None
    folder: Path | None = None
    wake: Callable[[], None] = lambda: None
    enlist: Enlist = lambda work: None
    loaded: int = 0
    built: int = 0
    _segments: dict[SegmentKey, HostedSegment] = field(default_factory=dict)
    _jobs: dict[SegmentKey, HostingJob] = field(default_factory=dict)
    _threads: list[threading.Thread] = field(default_factory=list)
    # a document may be forgotten at the moment at which its index is built
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def create(cls, runner: Runner, keys: KeySpace, config: EngineConfig) -> "Hosting":
        """None are hosted yet. With a ``disk_path`` they are kept in the folder ``hosted`` there,
        at most ``disk_gib`` of them; a folder that can't be used costs time, and no document."""
        on_gpu = runner.model.device.type == "cuda"
        made = cls(runner.model, runner.attention, keys, config.batched_tokens(on_gpu))
        tiers = config.tiers
        if tiers.disk_path is not None:
            root = Path(tiers.disk_path).expanduser() / HOSTED
            try:
                books = int(tiers.disk_gib * 2**30), tiers.tier_ttl, tiers.tenant_share
                made.tier = DiskTier(root, Ledger(*books))
                made.folder = root / "indexing"
            except TierFault as error:
                _log.warning("hosted documents are not kept on disk: %s", error)
        return made

    @property
    def indexing(self) -> Indexing:
        """What is indexed, now and later."""
        return Indexing(self._jobs, self._threads)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute."""
        return any(job.stage == "computing" for job in list(self._jobs.values()))

    @property
    def is_done(self) -> bool:
        """Whether no document is on its way."""
        return not self._jobs

    @property
    def counters(self) -> HostedCounters | None:
        """What was read so far, None where nothing can be."""
        hosted = self.attention.hosted
        return None if hosted is None else replace(hosted.counters)

    def find(self, key: SegmentKey) -> HostedSegment | None:
        """The document of ``key`` if it is computed and indexed."""
        return self._segments.get(key)

    def is_coming(self, key: SegmentKey) -> bool:
        """Whether the document of ``key`` is on its way, and was not there before."""
        return key in self._jobs and key not in self._segments

    def forget(self, key: SegmentKey) -> bool:
        """Drop a document, there or on its way, from memory and from the tier; whoever reads it now
        goes on. Whether it was there."""
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
        """Host the document of ``parts`` (`PromptBuilder.from_document`); it is there already if
        the tier has it, or with ``beside`` soon, when a thread has read it. The job tells when.

        Raises InvalidRequest if it is longer than the positions that the model reads, if scores
        of the model are not plain inner products, if no kernels can read it, or while it is on its
        way with another index."""
        page_size = self.attention.pool.page_size
        request = Request("(hosted)", parts, SamplingParams(max_tokens=1), salt, warms=True)
        sequence = Sequence(request, 0, self.keys, page_size)
        (use,) = sequence.documents
        key, tokens = use.key, use.tokens
        lead = sequence.lead.tokens if sequence.lead else []
        context = tuple(lead[: use.part.context_length])
        self._require_readable(len(context) + len(tokens))
        if (coming := self._jobs.get(key)) is not None:
            if coming.config == config or coming.asked:
                return self._ask_again(coming, config, on_progress)
            # an interrupted call has left it, and nobody else waits for it
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
        # only now `step` may find it, and whoever asks again after an interrupt
        self._jobs[key] = job
        self._begin_beside(job)
        job.asked += 1
        return job

    def _ask_again(
        self, job: HostingJob, config: IndexConfig, on_progress: OnProgress | None
    ) -> HostingJob:
        """A job that is on its way, for one more who waits for it; goes on with one that an
        interrupt has left, wherever that was."""
        _require_same(job.config, config)
        if not job.asked:
            job.on_progress = on_progress
        self._begin_beside(job)
        job.asked += 1
        return job

    def _drop(self, job: HostingJob) -> None:
        """End a job, and nothing else of its document."""
        with self._lock:
            if self._jobs.get(job.segment.key) is job:
                del self._jobs[job.segment.key]
        job.stage, job.pass_over = "forgotten", None
        job.finished.set()

    def _make_pass(self, job: HostingJob) -> HostedPass:
        return HostedPass(self.model.config, self.attention.rotations, self.attention.rules, job)

    def _bring(self, job: HostingJob) -> None:
        """Load a document, and go on with what the tier does not have of it. Gigabytes are read:
        requests go on meanwhile."""
        try:
            if self._load(job.segment, job.config):
                self._end(job, None, loaded=True)
                return
            made = None if job.segment.ready else self._make_pass(job)
        except Exception as error:
            self._end(job, error)
            return
        with self._lock:
            if self._jobs.get(job.segment.key) is not job or job.stage == "forgotten":
                return
            job.pass_over = made
            job.stage = "indexing" if made is None else "computing"
        if job.stage == "indexing":
            self._index(job)
        self.wake()

    def _room(self, key: SegmentKey, num_tokens: int, config: IndexConfig) -> HostedSegment:
        """The document with such an index, if it is here; its keys and values alone, if those are
        and the index learns from nothing else; else room for all of it."""
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
            dtype=self.model.dtype,
        )

    def step(self) -> None:
        """Compute a chunk of the oldest document that is not computed; a fault ends its job."""
        job = next((job for job in list(self._jobs.values()) if job.stage == "computing"), None)
        if job is None or job.pass_over is None:
            return
        try:
            # all of it is there if who heard of its last chunk was interrupted
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
        """Begin what threads do of a job, unless one is at it."""
        if job.thread is not None and job.thread.is_alive():
            return
        # looked at second: a thread that has ended changes no stage any more
        if job.stage in ("loading", "indexing"):
            self._begin(job, self._bring if job.stage == "loading" else self._index)

    def _begin(self, job: HostingJob, act: Callable[[HostingJob], None]) -> None:
        job.thread = thread = threading.Thread(
            target=act, args=(job,), name="looseleaf-indexing", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            # the system has no more threads
            self._end(job, error)
        finally:
            # of an interrupt, too, which may come when the thread runs
            both = (*self._threads, thread)
            self._threads[:] = filter(threading.Thread.is_alive, both)

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
            # deleted meanwhile, it may be hosted again by another job, whose parts these are
            if folder is not None and self._jobs.get(segment.key) is job:
                shutil.rmtree(folder, ignore_errors=True)
        except Exception as error:
            self._end(job, error)
            return
        self._end(job, None)

    def _end(self, job: HostingJob, error: Exception | None, *, loaded: bool = False) -> None:
        key = job.segment.key
        with self._lock:
            mine, wanted = self._jobs.get(key) is job, key in self._jobs or key in self._segments
            if mine:
                if error is not None:
                    # while it is still on its way, for that may take long
                    job.let_go()
                del self._jobs[key]
                job.error, job.stage = error, "failed" if error else "ready"
                if error is None:
                    self._segments[key] = job.segment
                    job.seconds = None if loaded else time.perf_counter() - job.began
                    job.stored = True if loaded else job.stored
                # who finds the document must not be told that it is on its way
                job.finished.set()
        if mine:
            self.wake()
        elif not wanted:
            # forgotten while it was stored
            self._discard(key)

    def _load(self, segment: HostedSegment, config: IndexConfig) -> bool:
        found = load(self.tier, segment, config)
        self.loaded += found
        return found

    def _discard(self, key: SegmentKey) -> None:
        """Delete what the disk has of a document."""
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


def _require_same(coming: IndexConfig, wanted: IndexConfig) -> None:
    """Raise InvalidRequest for another index than the one that is made already."""
    if coming == wanted:
        return
    differ = {f.name: (getattr(coming, f.name), getattr(wanted, f.name)) for f in fields(coming)}
    told = "; ".join(f"{name} {a!r}, not {b!r}" for name, (a, b) in differ.items() if a != b)
    raise InvalidRequest(
        f"the document is being hosted with another index ({told}): wait until that is there, "
        "then host it with this one"
    )

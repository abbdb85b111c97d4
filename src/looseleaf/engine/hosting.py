"""Documents that are hosted: computed once into the host's memory, indexed, and never in the pool.

A hosted document may be longer than the pool. It is computed chunk by chunk in the engine's steps,
beside the requests; its index is built on a thread of its own, since that takes longest and no
request must wait for it. With a tier both are stored, and a new process takes them from there."""

import hashlib
import logging
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from looseleaf.attention.hosted import HostedCounters, attend_segment, merge_all
from looseleaf.attention.hosted_device import HostedDevice
from looseleaf.attention.paged import PagedAttention
from looseleaf.config import EngineConfig, IndexConfig, ModelConfig
from looseleaf.engine.request import PromptParts, Request
from looseleaf.engine.runner import OnProgress, Runner
from looseleaf.engine.sequence import Sequence
from looseleaf.errors import InvalidRequest, LooseleafError
from looseleaf.index import Heads, SegmentIndex, build_segment
from looseleaf.kv.hosted import HostedSegment
from looseleaf.kv.keys import KeySpace, SegmentKey
from looseleaf.models import Decoder
from looseleaf.ops.rotate import rotate
from looseleaf.sampling_params import SamplingParams
from looseleaf.tiers import DiskTier, Ledger, Record, Tier, TierFault
from looseleaf.tiers.files import dtype_name
from looseleaf.types import Rotation, ScoreRule

_SIDECAR = "index"
# indexes that are built at a time where a GPU compares: one is compared, others are joined up
_WORKERS = 4
# kinds that learn from the document's own queries, or are chosen by them
_LEARNING = ("graph", "auto")
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class HostingJob:
    """A document on its way: ``context`` tokens that it sees, then its own.

    ``stage`` is what is done now; ``on_progress`` hears of it, of how much is done and how much
    there is: tokens, then indexes. It may be called from another thread."""

    segment: HostedSegment
    context: tuple[int, ...]
    tokens: tuple[int, ...]
    config: IndexConfig
    on_progress: OnProgress | None = None
    stage: str = "computing"
    error: Exception | None = None
    pass_over: "HostedPass | None" = None
    finished: threading.Event = field(default_factory=threading.Event)

    def tell(self, done: int, total: int) -> None:
        """Say how far it is."""
        if self.on_progress is not None:
            self.on_progress(self.stage, done, total)


@dataclass(eq=False)
class Hosting:
    """The hosted documents of an engine. Only `find` and a job's event are for any thread.

    ``folder`` keeps finished parts of indexes, so that a build that was killed goes on; ``tier``
    keeps whole documents with their index. ``wake`` is called when a document is ready."""

    model: Decoder
    attention: PagedAttention
    keys: KeySpace
    chunk_tokens: int
    tier: Tier | None = None
    folder: Path | None = None
    wake: Callable[[], None] = lambda: None
    loaded: int = 0
    built: int = 0
    _segments: dict[SegmentKey, HostedSegment] = field(default_factory=dict)
    _jobs: dict[SegmentKey, HostingJob] = field(default_factory=dict)

    @classmethod
    def create(cls, runner: Runner, keys: KeySpace, config: EngineConfig) -> "Hosting":
        """None are hosted yet. With a ``disk_path`` they are kept in the folder ``hosted`` there,
        at most ``disk_gib`` of them; a folder that can't be used costs time, and no document."""
        on_gpu = runner.model.device.type == "cuda"
        made = cls(runner.model, runner.attention, keys, config.batched_tokens(on_gpu))
        if config.tiers.disk_path is not None:
            root = Path(config.tiers.disk_path) / "hosted"
            try:
                made.tier = DiskTier(root, Ledger(int(config.tiers.disk_gib * 2**30)))
                made.folder = root / "indexing"
            except TierFault as error:
                _log.warning("hosted documents are not kept on disk: %s", error)
        return made

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute."""
        return any(job.stage == "computing" for job in list(self._jobs.values()))

    @property
    def counters(self) -> HostedCounters | None:
        """What was read so far, None where nothing can be."""
        hosted = self.attention.hosted
        return None if hosted is None else replace(hosted.counters)

    def find(self, key: SegmentKey) -> HostedSegment | None:
        """The document of ``key`` if it is computed and indexed."""
        return self._segments.get(key)

    def forget(self, key: SegmentKey) -> bool:
        """Drop a document from memory and from the tier; whoever reads it now goes on."""
        if self.tier is not None:
            self.tier.delete([_stored(key)])
        segment, hosted = self._segments.pop(key, None), self.attention.hosted
        if segment is not None and isinstance(hosted, HostedDevice):
            hosted.forget(segment)
        return segment is not None

    def add(
        self,
        parts: PromptParts,
        salt: str,
        config: IndexConfig,
        on_progress: OnProgress | None = None,
    ) -> HostingJob:
        """Host the document of ``parts`` (`PromptBuilder.from_document`); it is there already if
        the tier has it. The job tells when it is.

        Raises InvalidRequest if it is longer than the positions that the model reads, if scores
        of the model are not plain inner products, or no kernels can read it."""
        page_size = self.attention.pool.page_size
        request = Request("(hosted)", parts, SamplingParams(max_tokens=1), salt, warms=True)
        sequence = Sequence(request, 0, self.keys, page_size)
        (use,) = sequence.documents
        key, tokens = use.key, use.tokens
        lead = sequence.lead.tokens if sequence.lead else []
        context = tuple(lead[: use.part.context_length])
        self._require_readable(len(context) + len(tokens))
        if key in self._jobs:
            return self._jobs[key]
        segment = self._room(key, len(tokens), config)
        job = HostingJob(segment, context, tokens, config, on_progress)
        if segment.index is not None or (not segment.filled and self._load(segment, config)):
            job.stage = "ready"
            self._segments[key] = segment
            job.finished.set()
            return job
        self._jobs[key] = job
        if segment.ready:
            self._begin_index(job)
            return job
        attention = self.attention
        job.pass_over = HostedPass(self.model.config, attention.rotation, attention.rules, job)
        return job

    def _room(self, key: SegmentKey, num_tokens: int, config: IndexConfig) -> HostedSegment:
        """The document with such an index, if it is here; its keys and values alone, if those are
        and the index learns from nothing else; else room for all of it."""
        known, shape = self._segments.get(key), self.model.config
        if known is not None and known.index is not None and known.index.config == config:
            return known
        if known is not None and config.kind not in _LEARNING:
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
            job.pass_over.advance(self.model, self.chunk_tokens)
            job.tell(job.segment.filled, job.segment.num_tokens)
        except Exception as error:
            self._end(job, error)
            return
        if job.segment.ready:
            self._begin_index(job)

    def _begin_index(self, job: HostingJob) -> None:
        job.stage, job.pass_over = "indexing", None
        threading.Thread(
            target=self._index, args=(job,), name="looseleaf-indexing", daemon=True
        ).start()

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
            self._store(segment)
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        except Exception as error:
            self._end(job, error)
            return
        self._end(job, None)

    def _end(self, job: HostingJob, error: Exception | None) -> None:
        self._jobs.pop(job.segment.key, None)
        job.error, job.stage = error, "failed" if error else "ready"
        if error is None:
            self._segments[job.segment.key] = job.segment
        job.finished.set()
        self.wake()

    def _require_readable(self, num_tokens: int) -> None:
        attention = self.attention
        if attention.hosted is None:
            raise InvalidRequest(
                "hosted documents are read by the attention of a CPU or of a CUDA device: leave "
                "the implementation to 'auto', or register the document for the pool"
            )
        most = len(attention.rotation.cos)
        if num_tokens >= most:
            raise InvalidRequest(
                f"the document and what it sees have {num_tokens} tokens, and the context holds "
                f"{most}: shorten it, or raise max_model_len"
            )
        if any(r.window or r.soft_cap or r.alibi_slopes is not None for r in attention.rules):
            raise InvalidRequest(
                "an index finds keys by plain inner products: models with sliding windows, capped "
                "scores or ALiBi can't read hosted documents"
            )

    def _store(self, segment: HostedSegment) -> None:
        if self.tier is None or segment.index is None:
            return
        kv = segment.kv
        record = Record(
            _stored(segment.key),
            segment.num_tokens,
            kv.shape[0],
            # a page of its own for the whole of it
            (2, 1, kv.shape[2], kv.shape[3], kv.shape[4]),
            dtype_name(kv.dtype),
            kv[0].numel() * kv.element_size(),
        )
        try:
            self.tier.put(record, kv.view(len(kv), -1).view(torch.uint8))
            arrays = {n: torch.from_numpy(a.copy()) for n, a in segment.index.arrays().items()}
            self.tier.put_sidecar(record.key, _SIDECAR, arrays)
        except TierFault:
            # a tier that fails costs the next start time, and nothing now
            return

    def _load(self, segment: HostedSegment, config: IndexConfig) -> bool:
        """Take keys, values and index from the tier; False if they are not all there and sound."""
        if self.tier is None:
            return False
        key = _stored(segment.key)
        try:
            arrays = self.tier.get_sidecar(key, _SIDECAR)
            reader = self.tier.open(key)
            if arrays is None or reader is None:
                return False
            shape = (2, 1, *segment.kv.shape[2:])
            try:
                if (tuple(reader.record.layer_shape), reader.record.dtype) != (
                    shape,
                    dtype_name(segment.kv.dtype),
                ):
                    return False
                for layer, memory in enumerate(segment.kv.view(len(segment.kv), -1)):
                    raw = memory.view(torch.uint8)
                    read = reader.read(layer, raw)
                    if read.data_ptr() != raw.data_ptr():
                        raw.copy_(read)
            finally:
                reader.close()
            segment.filled = segment.num_tokens
            named = {name: np.asarray(array) for name, array in arrays.items()}
            index = SegmentIndex.load(named, segment)
            if index.config != config:
                return False
            segment.index = index
        except (TierFault, LooseleafError):
            return False
        self.loaded += 1
        return True


class HostedPass:
    """The prefill of a hosted document; what its layers call for attention.

    The tokens that the document sees come first and stay as they are; then the document, a chunk at
    a time. Nothing but the chunk and the document's own keys and values takes memory."""

    def __init__(
        self,
        shape: ModelConfig,
        rotation: Rotation,
        rules: tuple[ScoreRule, ...],
        job: HostingJob,
    ) -> None:
        self.job, self.rotation, self.rules = job, rotation, rules
        self.context: list[Tensor] = []
        self.context_done = not job.context
        self.places, self.first = torch.arange(0), 0
        self.sampled = _sampled(job, shape.num_qo_heads // shape.num_kv_heads)
        segment = job.segment
        segment.filled = 0
        segment.queries_of = [
            torch.empty(shape.num_qo_heads, len(self.sampled), shape.head_dim, dtype=kv.dtype)
            for kv in segment.layers
        ]

    def advance(self, model: Decoder, most: int) -> None:
        """Compute what it sees, or the next ``most`` tokens."""
        segment, context = self.job.segment, self.job.context
        if not self.context_done:
            model.forward(torch.tensor(context, device=model.device), self)
            self.context_done = True
            return
        stop = min(segment.filled + most, segment.num_tokens)
        self.first = segment.filled
        self.places = torch.arange(segment.filled, stop, device=model.device)
        tokens = torch.tensor(self.job.tokens[segment.filled : stop], device=model.device)
        model.forward(tokens, self)
        segment.filled = stop

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rule, dtype = self.rules[layer], q.dtype
        if not self.context_done:
            at = torch.arange(len(q), device=q.device)
            turned = (rotate(k, at, self.rotation), v)
            self.context.append(torch.stack([x.transpose(0, 1) for x in turned]))
            turned_q = rotate(q.float(), at, self.rotation)
            return attend_segment(turned_q, self.context[layer], rule, causal=True).out.to(dtype)
        kv, first, stop = self.job.segment.kv[layer], self.first, self.first + len(q)
        own = torch.stack((rotate(k, self.places, self.rotation), v)).transpose(1, 2)
        kv[:, :, first:stop] = own
        turned_q = rotate(q.float(), self.places, self.rotation)
        self._keep(layer, turned_q, first, stop)
        states = [
            attend_segment(turned_q, own, rule, causal=True),
            attend_segment(turned_q, kv[:, :, :first], rule),
        ]
        if self.context:
            behind = rotate(q.float(), self.places + len(self.job.context), self.rotation)
            states.append(attend_segment(behind, self.context[layer], rule))
        return merge_all(states).out.to(dtype)

    def _keep(self, layer: int, q: Tensor, first: int, stop: int) -> None:
        """Keep the chunk's queries that the index is to learn from."""
        lower, upper = torch.searchsorted(self.sampled, torch.tensor([first, stop])).tolist()
        rows = self.sampled[lower:upper] - first
        kept = q[rows.to(q.device)].transpose(0, 1)
        self.job.segment.queries_of[layer][:, lower:upper] = kept


def _sampled(job: HostingJob, group: int) -> Tensor:
    """Tokens whose queries are kept, rising: with all heads of a KV head as many as are learnt
    from, and some to measure with."""
    config, num_tokens = job.config, len(job.tokens)
    if config.kind not in _LEARNING:
        return torch.arange(0)
    heads = group if config.per == "kv_head" else 1
    wanted = min(num_tokens, round(1.1 * config.sample * num_tokens / heads) + 64)
    generator = torch.Generator().manual_seed(config.seed)
    return torch.randperm(num_tokens, generator=generator)[:wanted].sort().values


def _stored(key: SegmentKey) -> SegmentKey:
    """The name in a tier: not that of the same document in pages, which has another shape."""
    return SegmentKey(hashlib.blake2b(b"hosted" + key, digest_size=32).digest())

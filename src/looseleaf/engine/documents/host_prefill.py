"""A document on its way to be hosted: what is known of it meanwhile, and the pass that computes it.

It is computed chunk by chunk, each of which sees what the document sees and all of the document
before; then its index is built, by whoever holds the job."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from looseleaf.attention.host.attend import attend_segment, merge_all
from looseleaf.config import IndexConfig, ModelConfig
from looseleaf.engine.runner.runner import OnProgress
from looseleaf.kv.hosted import HostedSegment
from looseleaf.models import Decoder
from looseleaf.ops.rotate import rotate
from looseleaf.types import Rotation, ScoreRule

# kinds of index that learn from the document's own queries, or are chosen by them
LEARNING = ("graph", "auto")


class Forgotten(Exception):
    """The document was deleted while it was indexed."""


@dataclass(eq=False)
class HostingJob:
    """A document on its way: ``context`` tokens that it sees, then its own.

    ``stage`` is what is done now; ``on_progress`` hears of it, of how much is done and how much
    there is: tokens, then indexes. It may be called from another thread. ``asked`` is how many wait
    for it: none where all were interrupted. ``seconds`` is how long it took from when it ``began``,
    None before, and if it was there already. ``stored`` is whether
    the disk has it, None without a disk and before that is known."""

    segment: HostedSegment
    context: tuple[int, ...]
    tokens: tuple[int, ...]
    config: IndexConfig
    on_progress: OnProgress | None = None
    stage: str = "computing"
    error: Exception | None = None
    pass_over: "HostedPass | None" = None
    tenant: str = ""
    asked: int = 0
    thread: threading.Thread | None = None
    stored: bool | None = None
    finished: threading.Event = field(default_factory=threading.Event)
    began: float = field(default_factory=time.perf_counter)
    seconds: float | None = None

    def tell(self, done: int, total: int) -> None:
        """Say how far it is; raises `Forgotten` where that is no longer wanted."""
        if self.stage == "forgotten":
            raise Forgotten
        if self.on_progress is not None:
            self.on_progress(self.stage, done, total)

    def let_go(self) -> None:
        """Give back the memory of a document that has failed."""
        segment, self.pass_over = self.segment, None
        segment.kv, segment.queries_of = segment.kv[..., :0, :].clone(), []
        segment.filled = 0


class HostedPass:
    """The prefill of a hosted document; what its layers call for attention.

    The tokens that the document sees come first and stay as they are; then the document, a chunk at
    a time. Nothing but the chunk and the document's own keys and values takes memory."""

    def __init__(
        self,
        shape: ModelConfig,
        rotations: Sequence[Rotation],
        rules: tuple[ScoreRule, ...],
        job: HostingJob,
    ) -> None:
        self.job, self.rotations, self.rules = job, rotations, rules
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
            # an interrupt may have left the first layers of it
            self.context.clear()
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
        rotation, rule, dtype = self.rotations[layer], self.rules[layer], q.dtype
        if not self.context_done:
            at = torch.arange(len(q), device=q.device)
            turned = (rotate(k, at, rotation), v)
            self.context.append(torch.stack([x.transpose(0, 1) for x in turned]))
            turned_q = rotate(q.float(), at, rotation)
            seen = self.context[layer]
            return attend_segment(turned_q, seen, rule, causal=True, of_prompt=True).out.to(dtype)
        kv, first, stop = self.job.segment.kv[layer], self.first, self.first + len(q)
        own = torch.stack((rotate(k, self.places, rotation), v)).transpose(1, 2)
        kv[:, :, first:stop] = own
        turned_q = rotate(q.float(), self.places, rotation)
        self._keep(layer, turned_q, first, stop)
        states = [
            attend_segment(turned_q, own, rule, causal=True, of_prompt=True),
            attend_segment(turned_q, kv[:, :, :first], rule, of_prompt=True),
        ]
        if self.context:
            behind = rotate(q.float(), self.places + len(self.job.context), rotation)
            states.append(attend_segment(behind, self.context[layer], rule, of_prompt=True))
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
    if config.kind not in LEARNING:
        return torch.arange(0)
    heads = group if config.per == "kv_head" else 1
    wanted = min(num_tokens, round(1.1 * config.sample * num_tokens / heads) + 64)
    generator = torch.Generator().manual_seed(config.seed)
    return torch.randperm(num_tokens, generator=generator)[:wanted].sort().values

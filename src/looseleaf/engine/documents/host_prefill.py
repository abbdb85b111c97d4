"""Host prefill: the job and the chunked pass that compute a host-resident document.

Each chunk reads the document's context and the earlier chunks. The job then builds the index."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from looseleaf.attention.query_scales import scaled, scales_of
from looseleaf.config import IndexConfig, ModelConfig
from looseleaf.engine.runner.runner import OnProgress
from looseleaf.index.host.attend import attend_segment, merge_all
from looseleaf.index.host.segment import HostedSegment
from looseleaf.models import Decoder
from looseleaf.ops.add_sinks import add_sinks
from looseleaf.ops.rotate import rotate
from looseleaf.types import AttnState, Rotation, ScoreRule

# kinds of index that learn from the document's own queries, or are chosen by them
LEARNING = ("graph", "auto")


class Forgotten(Exception):
    """The document was deleted while it was indexed."""


@dataclass(eq=False)
class HostingJob:
    """The job of a host-resident document: ``context`` tokens that it reads, then its ``tokens``.

    ``on_progress`` is called, possibly from another thread, with the ``stage``, the completed items
    and their total: tokens, then indexes. ``num_callers`` wait for it, 0 if all were interrupted.
    ``seconds`` is the time since it ``began``, None before its end or if it was ready already.
    ``stored`` is whether the disk has it, None without a disk or before that is known."""

    segment: HostedSegment
    context: tuple[int, ...]
    tokens: tuple[int, ...]
    config: IndexConfig
    on_progress: OnProgress | None = None
    stage: str = "computing"
    error: Exception | None = None
    pass_over: "HostedPass | None" = None
    tenant: str = ""
    num_callers: int = 0
    thread: threading.Thread | None = None
    stored: bool | None = None
    finished: threading.Event = field(default_factory=threading.Event)
    began: float = field(default_factory=time.perf_counter)
    seconds: float | None = None

    def tell(self, completed: int, total: int) -> None:
        """Report progress; raises `Forgotten` if the document was deleted."""
        if self.stage == "forgotten":
            raise Forgotten
        if self.on_progress is not None:
            self.on_progress(self.stage, completed, total)

    def let_go(self) -> None:
        """Release the memory of a failed document."""
        segment, self.pass_over = self.segment, None
        segment.kv, segment.queries_of = segment.kv[..., :0, :].clone(), []
        segment.filled = 0


class HostedPass:
    """The prefill of a host-resident document, called by its layers as attention.

    It computes the context first, then the document chunk by chunk. It allocates memory only for
    the chunk and for the keys and values of context and document."""

    def __init__(
        self,
        shape: ModelConfig,
        rotations: Sequence[Rotation],
        rules: tuple[ScoreRule, ...],
        job: HostingJob,
    ) -> None:
        self.job, self.rotations, self.rules = job, rotations, rules
        self._scaling = shape.query_scaling
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
        """Compute the context, or the next ``most`` tokens of the document."""
        segment, context = self.job.segment, self.job.context
        if not self.context_done:
            # an interrupted call may have left its first layers
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

    def __call__(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        assert k is not None and v is not None, (
            "layers with windows, which may share KV, are refused"
        )
        rotation, rule, dtype = self.rotations[layer], self.rules[layer], q.dtype
        if not self.context_done:
            at = torch.arange(len(q), device=q.device)
            q = self._scaled(q, at)
            self.context.append(self._planes(rotate(k, at, rotation), v))
            turned_q = rotate(q.float(), at, rotation)
            seen = self.context[layer]
            state = attend_segment(turned_q, seen, rule, causal=True, of_prompt=True)
            return _completed(state, rule).to(dtype)
        q = self._scaled(q, self.places + len(self.job.context))
        kv, first, stop = self.job.segment.kv[layer], self.first, self.first + len(q)
        own = self._planes(rotate(k, self.places, rotation), v)
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
        return _completed(merge_all(states), rule).to(dtype)

    def _scaled(self, q: Tensor, positions: Tensor) -> Tensor:
        return scaled(q, scales_of(self._scaling, positions, q.dtype))

    def _planes(self, k: Tensor, v: Tensor) -> Tensor:
        """Keys and values as the segment stores them, ``[planes, kv_heads, rows, head_dim]``."""
        return torch.stack((k, v)[: self.job.segment.kv.shape[1]]).transpose(1, 2)

    def _keep(self, layer: int, q: Tensor, first: int, stop: int) -> None:
        """Store the chunk's queries from which the index learns."""
        lower, upper = torch.searchsorted(self.sampled, torch.tensor([first, stop])).tolist()
        rows = self.sampled[lower:upper] - first
        kept = q[rows.to(q.device)].transpose(0, 1)
        self.job.segment.queries_of[layer][:, lower:upper] = kept


def _completed(state: AttnState, rule: ScoreRule) -> Tensor:
    """The output of rows that have read all of their keys."""
    return state.out if rule.sinks is None else add_sinks(state, rule.sinks).out


def _sampled(job: HostingJob, group: int) -> Tensor:
    """Ascending tokens whose queries are stored, for the index to learn from and to measure."""
    config, num_tokens = job.config, len(job.tokens)
    if config.kind not in LEARNING:
        return torch.arange(0)
    heads = group if config.per == "kv_head" else 1
    count = min(num_tokens, round(1.1 * config.sample * num_tokens / heads) + 64)
    generator = torch.Generator().manual_seed(config.seed)
    return torch.randperm(num_tokens, generator=generator)[:count].sort().values

"""Attention to host-resident segments: end keys and the index's keys, or all keys.

A decode row reads the segment's first and last keys, and the keys that the index returns for each
query head; the states merge with the row's others (law 1). Prompt rows read all keys. The query
rotates to the segment's frame, so one index serves every position and every request."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.index import (
    IvfIndex,
    KeyVectors,
    KVIndex,
    SegmentIndex,
    attend_estimated,
    search_each,
)
from looseleaf.index.host.segment import HostedSegment
from looseleaf.ops.flash.cpu import attend_dense
from looseleaf.ops.flash.cuda import attend_dense_cuda
from looseleaf.ops.rotate import rotate
from looseleaf.types import AttnState, Rotation, ScoreRule

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
# keys of a tile for prompt rows
_TILE = 8192


@dataclass(frozen=True)
class HostedRead:
    """A row's or a chunk's read of a segment at ``offset`` (Δ).

    The index returns ``count`` keys per query head, besides the first and last ones. All keys are
    read if ``count`` is 0, in ``dense_layers``, and in segments without an index. ``layer_counts``
    overrides ``count`` layer by layer."""

    segment: HostedSegment
    offset: int
    count: int = 0
    dense_layers: frozenset[int] = frozenset()
    layer_counts: tuple[int, ...] = ()

    def count_at(self, layer: int) -> int:
        """The keys that a search returns in ``layer``."""
        return self.layer_counts[layer] if self.layer_counts else self.count

    @property
    def most(self) -> int:
        """The most keys that a search returns in a layer."""
        return max(self.layer_counts, default=self.count)

    @property
    def leaves_out(self) -> bool:
        """Whether some layer skips keys."""
        index = self.segment.index
        return index is not None and 0 < self.count < len(index.indexed)

    def index_at(self, layer: int) -> SegmentIndex | None:
        """The index to search in ``layer``, None where all keys are read."""
        if self.count == 0 or layer in self.dense_layers:
            return None
        return self.segment.index


@dataclass
class HostedCounters:
    """Decode rows' reads of host-resident segments: rows × layers × query heads.

    ``keys`` counts the keys of the segments read, ``keys_read`` the attended ones, ``keys_scanned``
    the vectors that searches compared. ``sampled`` reads were compared with an exact search;
    ``recall_sum`` adds up the shares of its keys that the index returned."""

    reads: int = 0
    keys: int = 0
    keys_read: int = 0
    keys_scanned: int = 0
    sampled: int = 0
    recall_sum: float = 0.0

    @property
    def recall(self) -> float | None:
        """Mean recall of the sample, None without one."""
        return self.recall_sum / self.sampled if self.sampled else None

    @property
    def share_scanned(self) -> float | None:
        """Share of the keys that searches compared, None before the first read."""
        return self.keys_scanned / self.keys if self.keys else None

    @property
    def share_read(self) -> float | None:
        """Share of the keys that rows attended to, None before the first read."""
        return self.keys_read / self.keys if self.keys else None


@dataclass(eq=False)
class HostedAttention:
    """Reads of host-resident segments on worker threads; ``sample`` is the share of searches with
    measured recall."""

    rotations: Sequence[Rotation]
    threads: int = 1
    sample: float = 1 / 256
    counters: HostedCounters = field(default_factory=HostedCounters)
    _pool: ThreadPoolExecutor | None = None
    _number: int = 0
    _keepers: "list[Callable[[HostedSegment], None]]" = field(default_factory=list)

    def kept_by(self, forget: Callable[[HostedSegment], None]) -> None:
        """Register ``forget`` to be called with deleted segments."""
        self._keepers.append(forget)

    def forget(self, segment: HostedSegment) -> None:
        for keeper in self._keepers:
            keeper(segment)

    def submit(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **more: Arguments.kwargs
    ) -> "Future[Result]":
        """Run ``function`` on the reading thread."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "looseleaf-hosted")
        return self._pool.submit(function, *args, **more)

    def decode(
        self,
        layer: int,
        q: Float[Tensor, "rows qo_heads head_dim"],
        positions: Sequence[int],
        reads: Sequence[Sequence[HostedRead]],
        rule: ScoreRule,
    ) -> AttnState:
        """The reads of decode rows, on this thread; row i makes ``reads[i]`` at ``positions[i]``.

        Returns one fp32 state a row, ``(0, -inf)`` for a row without reads."""
        flat = [(row, read) for row, several in enumerate(reads) for read in several]
        rows = torch.tensor([row for row, _ in flat])
        positions_in_frame = torch.tensor([positions[row] - read.offset for row, read in flat])
        rotated = rotate(q[rows].float(), positions_in_frame, self.rotations[layer])
        states = [
            self._always(layer, rotated[n : n + 1], read, rule) for n, (_, read) in enumerate(flat)
        ]
        searched = self._searched(layer, rotated, [read for _, read in flat], rule)
        total = AttnState(torch.zeros(q.shape), torch.full(q.shape[:2], -torch.inf))
        for number, (row, _) in enumerate(flat):
            parts = [AttnState(total.out[row : row + 1], total.lse[row : row + 1]), states[number]]
            if number in searched:
                parts.append(searched[number])
            joint = merge_all(parts)
            total.out[row], total.lse[row] = joint.out[0], joint.lse[0]
        return total

    def _always(self, layer: int, q: Tensor, read: HostedRead, rule: ScoreRule) -> AttnState:
        """The state over the keys that are read without a search."""
        kv = read.segment.kv[layer]
        index = read.index_at(layer)
        if index is None:
            self._count(q.shape[1], kv.shape[2], kv.shape[2], 0)
            return attend_segment(q, kv, rule)
        tokens = index.indexed
        ends = torch.cat((kv[:, :, : tokens.start], kv[:, :, tokens.stop :]), 2)
        if not len(tokens):
            ends = kv
        self._count(q.shape[1], kv.shape[2], ends.shape[2], 0)
        return attend_segment(q, ends, rule)

    def _searched(
        self, layer: int, q: Tensor, reads: Sequence[HostedRead], rule: ScoreRule
    ) -> dict[int, AttnState]:
        """The states over the indexes' keys, for each read that searches."""
        alike: dict[str, list[int]] = {}
        for number, read in enumerate(reads):
            index = read.index_at(layer)
            if index is not None and len(index.indexed):
                # a call searches keys of one dtype
                alike.setdefault(index.config.keys, []).append(number)
        states: dict[int, AttnState] = {}
        for numbers in alike.values():
            states |= self._search(layer, q, reads, numbers, rule)
        return states

    def _search(
        self,
        layer: int,
        q: Tensor,
        reads: Sequence[HostedRead],
        numbers: Sequence[int],
        rule: ScoreRule,
    ) -> dict[int, AttnState]:
        """The states over the indexes' keys for the reads ``numbers``, with keys of one dtype."""
        indexes: list[KVIndex] = []
        values: list[KeyVectors] = []
        counts: list[int] = []
        efforts: list[int] = []
        for read in (reads[number] for number in numbers):
            index = read.index_at(layer)
            assert index is not None
            for head in range(q.shape[1]):
                indexes.append(index.at(layer, head))
                values.append(read.segment.values(layer, head // index.heads.group))
                counts.append(min(read.count_at(layer), len(index.indexed)))
                # the effort suits `top` keys; more keys need more
                more = max(1.0, counts[-1] / index.config.top)
                efforts.append(round(indexes[-1].effort * more))
        heads = q.shape[1]
        queries = q[list(numbers)].reshape(-1, q.shape[2])
        hits, state = search_each(
            indexes,
            queries,
            counts,
            values=values,
            softmax_scale=rule.softmax_scale,
            effort=efforts,
            threads=self.threads,
        )
        assert state is not None
        self._count(0, 0, int((hits.ids >= 0).sum()), int(hits.scanned.sum()))
        self._measure(indexes, queries, counts, hits.scores)
        for n, unit in enumerate(indexes):
            partial = counts[n] < len(unit)
            if isinstance(unit, IvfIndex) and unit.estimate is not None and partial:
                hit = hits.ids[n], hits.scores[n]
                estimate = attend_estimated(unit, queries[n], hit, values[n], rule.softmax_scale)
                state.out[n, 0], state.lse[n, 0] = estimate
        out, lse = state.out.view(-1, heads, q.shape[2]), state.lse.view(-1, heads)
        return {
            number: AttnState(out[n : n + 1], lse[n : n + 1]) for n, number in enumerate(numbers)
        }

    def _count(self, heads: int, keys: int, read: int, scanned: int) -> None:
        counters = self.counters
        counters.reads += heads
        counters.keys += heads * keys
        counters.keys_read += heads * read if heads else read
        counters.keys_scanned += scanned

    def _measure(
        self,
        indexes: Sequence[KVIndex],
        queries: Tensor,
        counts: Sequence[int],
        scores: Tensor,
    ) -> None:
        """Measure the recall of a sample of searches against all keys."""
        if self.sample <= 0:
            return
        step = max(1, round(1 / self.sample))
        for n, index in enumerate(indexes):
            self._number += 1
            if self._number % step:
                continue
            exact = (index.keys.source.gather(slice(0, None)) @ queries[n]).topk(counts[n]).values
            slack = 1e-4 * exact[-1].abs() + 1e-6
            returned = int((scores[n] >= exact[-1] - slack).sum())
            self.counters.sampled += 1
            self.counters.recall_sum += min(returned, counts[n]) / counts[n]


def read_chunk(
    layer: int,
    q: Float[Tensor, "rows qo_heads head_dim"],
    positions: Int[Tensor, " rows"],
    reads: Sequence[HostedRead],
    rule: ScoreRule,
    rotation: Rotation,
) -> AttnState:
    """The state of a prompt's rows, all after the segments: every key is read.

    On a GPU keys and values are copied tile by tile, each read once and released."""
    states = []
    for read in reads:
        rotated = rotate(q.float(), positions - read.offset, rotation)
        states.append(attend_segment(rotated, read.segment.kv[layer], rule, of_prompt=True))
    return merge_all(states)


def attend_segment(
    q: Float[Tensor, "rows qo_heads head_dim"],
    kv: Float[Tensor, "planes kv_heads keys head_dim"],
    rule: ScoreRule,
    causal: bool = False,
    *,
    of_prompt: bool = False,
) -> AttnState:
    """The state of rows, rotated to the segment's frame, over all its keys; fp32.

    ``kv`` has keys and values, or keys that are the values.

    ``causal`` rows are the segment's own: row i sees keys up to i. On a CPU ``of_prompt`` rows are
    multiplied in the keys' own dtype, as in the pool, all others in fp32."""
    states = []
    dtype = kv.dtype if of_prompt else torch.float32
    heads = q.to(dtype).transpose(0, 1)[None]
    step = kv.shape[2] if causal else _TILE
    for first in range(0, kv.shape[2], max(step, 1)):
        tile = kv[:, :, first : first + step]
        if q.is_cuda:
            sides = _to_device(tile, q.device)
            scale = rule.softmax_scale
            states.append(attend_dense_cuda(q, sides[0], sides[-1], scale, causal))
            continue
        wide = tile[:, None].to(dtype)
        out, lse = attend_dense(heads, wide[0], wide[-1], rule, causal=causal)
        states.append(AttnState(out[0].transpose(0, 1), lse[0].transpose(0, 1)))
    if not states:
        return AttnState(q.new_zeros(q.shape), q.new_full(q.shape[:2], -torch.inf))
    return merge_all(states)


def _to_device(tile: Tensor, device: torch.device) -> Tensor:
    """A tile on ``device``; the host may copy the next one meanwhile."""
    if tile.device == device:
        return tile
    staged = torch.empty(tile.shape, dtype=tile.dtype, pin_memory=True)
    return staged.copy_(tile).to(device, non_blocking=True)


def merge_all(states: Sequence[AttnState]) -> AttnState:
    """The merge of states of the same rows, in their order."""
    lse = torch.stack([state.lse.float() for state in states])
    total = lse.logsumexp(0)
    pivot = total.masked_fill(total == -torch.inf, 0.0)
    weights = (lse - pivot).exp()[..., None]
    out = (weights * torch.stack([state.out.float() for state in states])).sum(0)
    return AttnState(out, total)

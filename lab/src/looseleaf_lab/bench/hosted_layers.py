"""Keys of a hosted document with the papers' mismatch, made on a device, and indexes over them.

Random weights ask for nothing, so what a decoding model asks is made too: each KV head's keys and
queries are a made layer (`looseleaf_lab.bench.index_layers`), and the model is given the queries.
All layers of the model have the same keys, in memory of their own."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from looseleaf.config import IndexConfig
from looseleaf.index import (
    GraphIndex,
    Heads,
    Hits,
    IvfIndex,
    KeyVectors,
    KVIndex,
    SegmentIndex,
    build_segment,
    search_each,
)
from looseleaf.index.choosing import recall_of
from looseleaf.kv.hosted import HostedSegment
from looseleaf.kv.keys import SegmentKey
from looseleaf.ops.native.host_memory import host_zeros
from looseleaf.ops.nearest_keys import NearestKeys, nearest_keys
from looseleaf_lab.bench.index_layers import made_layer

Ask = Callable[[int], tuple[float, float]]


@dataclass(frozen=True)
class MadeKeys:
    """Keys ``[kv_heads, tokens, head_dim]`` of one layer, queries of each KV head to learn from and
    others to ask with, ``[kv_heads, queries, head_dim]``. Only ``distinct`` heads differ."""

    keys: Tensor
    learnt: Tensor
    asked: Tensor
    distinct: int

    @classmethod
    def create(
        cls, kind: str, num_tokens: int, heads: Heads, distinct: int, asked: int, dtype: torch.dtype
    ) -> "MadeKeys":
        """Made layers of ``distinct`` seeds, taken in turn."""
        made = [made_layer(kind, num_tokens, asked, seed) for seed in range(distinct)]
        turn = [made[head % distinct] for head in range(heads.num_kv_heads)]
        return cls(
            torch.stack([one.keys.to(dtype) for one in turn]),
            torch.stack([one.queries for one in turn]),
            torch.stack([one.asked for one in turn]),
            distinct,
        )

    def first(self, num_tokens: int) -> "MadeKeys":
        """The same with the first tokens only."""
        learnt = self.learnt[:, : max(1, len(self.learnt[0]) * num_tokens // len(self.keys[0]))]
        return replace(self, keys=self.keys[:, :num_tokens], learnt=learnt)

    def exact(self, config: IndexConfig, count: int, device: torch.device) -> NearestKeys:
        """The nearest of the indexed keys to every query that is asked, head by head."""
        last = self.keys.shape[1] - config.local
        found = [
            nearest_keys(q.to(device), k[config.sink : last].to(device).float(), count)
            for k, q in zip(self.keys[: self.distinct], self.asked, strict=False)
        ]
        return NearestKeys(
            torch.cat([one.ids.cpu() for one in found]),
            torch.cat([one.scores.cpu() for one in found]),
        )


@dataclass(frozen=True)
class Built:
    """The indexes of one layer, at an effort that finds ``recall``, with ``scanned`` of the keys
    compared; ``seconds`` to build them, wall time."""

    index: SegmentIndex
    seconds: float
    recall: float
    scanned: float

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a KV head's index for a token."""
        return self.index.num_bytes / len(self.index.units) / self.index.num_tokens


class _OneLayer:
    """The made keys as a segment of one layer, whose query heads share what is learnt from."""

    def __init__(self, made: MadeKeys, group: int) -> None:
        self._made, self._group = made, group

    def keys(self, layer: int, kv_head: int) -> Tensor:
        return self._made.keys[kv_head]

    def queries(self, layer: int, qo_head: int) -> Tensor:
        head, own = divmod(qo_head, self._group)
        return self._made.learnt[head, own :: self._group]


def build_layer(
    made: MadeKeys,
    heads: Heads,
    config: IndexConfig,
    *,
    exact: NearestKeys,
    wanted: float,
    device: torch.device,
    workers: int,
    threads: int,
) -> Built:
    """Build the index of each distinct head, ``workers`` at a time, and find the least effort with
    recall ``wanted`` of as many keys as ``exact`` has."""
    own = Heads(1, heads.group * made.distinct, made.distinct)
    begun = time.perf_counter()
    index = build_segment(
        _OneLayer(made, heads.group), made.keys.shape[1], own, config,
        device=device, workers=workers,
    )  # fmt: skip
    seconds = time.perf_counter() - begun
    units = [index.units[0, head] for head in range(made.distinct)]
    asked = made.asked.shape[1]
    several = [unit for unit in units for _ in range(asked)]
    queries = made.asked[: made.distinct].flatten(0, 1)

    def ask(effort: int) -> tuple[float, float]:
        count = exact.ids.shape[1]
        hits, _ = search_each(several, queries, count, effort=effort, threads=threads)
        scanned = float(hits.scanned.double().mean()) / len(units[0])
        return recall_of(Hits(*hits), exact), scanned

    effort = _least_effort(units[0], exact.ids.shape[1], wanted, ask)
    for unit in units:
        unit.effort = effort
    return Built(index, seconds, *ask(effort))


def _least_effort(index: KVIndex, count: int, wanted: float, ask: Ask) -> int:
    if index.kind == "flat":
        return 0
    low, high = 1, 64
    if index.kind == "graph":
        # the least that it looks behind
        low, high = (count + 1) // 2, count
    while ask(high)[0] < wanted and high < len(index):
        low, high = high, 2 * high
    while high - low > max(1, high // 64):
        middle = (low + high) // 2
        low, high = (low, middle) if ask(middle)[0] >= wanted else (middle, high)
    return high


class InTurn:
    """``num_layers`` layers of a segment that read ``kv`` ``[copies, 2, kv_heads, tokens,
    head_dim]`` in turn: memory is filled for some, and no cache holds them."""

    def __init__(self, kv: Tensor, num_layers: int) -> None:
        self._kv, self._num_layers = kv, num_layers
        self.shape = (num_layers, *kv.shape[1:])

    def __getitem__(self, at: Any) -> Tensor:
        layer, *others = at if isinstance(at, tuple) else (at,)
        return self._kv[(layer % len(self._kv), *others)]


def host_layers(made: MadeKeys, kv: Tensor, built: Built, heads: Heads) -> HostedSegment:
    """A segment of all layers, whose keys are in ``kv`` already, see `InTurn`; each copy of the
    keys has a copy of the indexes of ``built``."""
    copies, _, _, num_tokens, _ = kv.shape
    one = built.index
    layers: Any = InTurn(kv, heads.num_layers)
    segment = HostedSegment(SegmentKey(one.config.kind.encode().ljust(32)), num_tokens, kv)
    segment.kv = layers
    segment.filled = num_tokens
    tokens, units = one.indexed, {}
    for layer, head in heads.units(one.config):
        if layer < copies:
            stored = KeyVectors(kv[layer, 0, head, tokens.start : tokens.stop], len(tokens))
            units[layer, head] = _copy(one.units[0, head % made.distinct], stored)
        else:
            units[layer, head] = units[layer % copies, head]
    segment.index = SegmentIndex(one.config, heads, num_tokens, units)
    return segment


def _copy(index: KVIndex, stored: KeyVectors) -> KVIndex:
    keys, known = stored, index.keys
    if known.exact is not None:
        narrow = host_zeros(known.vectors.shape, known.vectors.dtype).copy_(known.vectors)
        scales = None if known.scales is None else known.scales.clone()
        keys = KeyVectors(narrow, len(known), scales, exact=stored)
    made = type(index)(keys, index.built, index.config, index.effort)
    if isinstance(index, GraphIndex) and isinstance(made, GraphIndex):
        for name in ("order", "links", "codes"):
            array = getattr(index, name)
            setattr(made, name, host_zeros(array.shape, array.dtype).copy_(array))
        made.num_entries, made.steps = index.num_entries, index.steps
    if isinstance(index, IvfIndex) and isinstance(made, IvfIndex):
        made.means, made.starts = index.means.clone(), index.starts.clone()
        made.members = index.members.clone()
    return made


def fill(kv: Tensor, made: MadeKeys) -> None:
    """Write the made keys to every layer of ``kv``, and values that are normal, the same too."""
    values = torch.randn(made.keys.shape[1:], generator=torch.Generator().manual_seed(1))
    narrow = values.to(kv.dtype)
    for layer in kv:
        layer[0].copy_(made.keys)
        layer[1].copy_(narrow.expand_as(layer[1]))

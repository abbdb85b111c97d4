"""Synthetic keys of a host-resident document with the query mismatch of the papers, and indexes
over them.

Queries of random weights match no key, so queries are synthetic too. Each KV head's keys and
queries are a synthetic layer (`looseleaf_lab.bench.index_layers`), and the model uses these
queries. All layers have the same keys in separate memory, so caches give no advantage."""

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
from looseleaf.index.host.segment import HostedSegment
from looseleaf.kv.keys import SegmentKey
from looseleaf.ops.native.host_memory import host_zeros
from looseleaf.ops.nearest_keys import NearestKeys, nearest_keys
from looseleaf_lab.bench.index_layers import synthetic_layer

EffortRun = Callable[[int], tuple[float, float]]


@dataclass(frozen=True)
class SyntheticKeys:
    """Keys ``[kv_heads, tokens, head_dim]`` of one layer, with separate queries to build indexes
    and to test them, ``[kv_heads, queries, head_dim]``. Only ``distinct`` heads differ."""

    keys: Tensor
    build_queries: Tensor
    test_queries: Tensor
    distinct: int

    @classmethod
    def create(
        cls,
        kind: str,
        num_tokens: int,
        heads: Heads,
        distinct: int,
        num_queries: int,
        dtype: torch.dtype,
    ) -> "SyntheticKeys":
        """Synthetic layers of ``distinct`` seeds, repeated over the heads."""
        layers = [synthetic_layer(kind, num_tokens, num_queries, seed) for seed in range(distinct)]
        head_layers = [layers[head % distinct] for head in range(heads.num_kv_heads)]
        return cls(
            torch.stack([layer.keys.to(dtype) for layer in head_layers]),
            torch.stack([layer.queries for layer in head_layers]),
            torch.stack([layer.test_queries for layer in head_layers]),
            distinct,
        )

    def first(self, num_tokens: int) -> "SyntheticKeys":
        """The first ``num_tokens`` tokens, with a proportional part of the build queries."""
        build_queries = self.build_queries[
            :, : max(1, len(self.build_queries[0]) * num_tokens // len(self.keys[0]))
        ]
        return replace(self, keys=self.keys[:, :num_tokens], build_queries=build_queries)

    def exact(self, config: IndexConfig, count: int, device: torch.device) -> NearestKeys:
        """The ``count`` nearest indexed keys of every test query, head by head."""
        last = self.keys.shape[1] - config.local
        per_head = [
            nearest_keys(q.to(device), k[config.sink : last].to(device).float(), count)
            for k, q in zip(self.keys[: self.distinct], self.test_queries, strict=False)
        ]
        return NearestKeys(
            torch.cat([nearest.ids.cpu() for nearest in per_head]),
            torch.cat([nearest.scores.cpu() for nearest in per_head]),
        )


@dataclass(frozen=True)
class BuiltLayer:
    """The indexes of one layer at the effort that gives ``recall``.

    ``scanned`` is the share of keys compared, ``seconds`` the wall time of the build."""

    index: SegmentIndex
    seconds: float
    recall: float
    scanned: float

    @property
    def bytes_per_token(self) -> float:
        """Index bytes of a KV head per token."""
        return self.index.num_bytes / len(self.index.units) / self.index.num_tokens


class _OneLayer:
    """A segment of one layer; the query heads of a group share the build queries."""

    def __init__(self, keys_of_layer: SyntheticKeys, group: int) -> None:
        self._keys, self._group = keys_of_layer, group

    def keys(self, layer: int, kv_head: int) -> Tensor:
        return self._keys.keys[kv_head]

    def queries(self, layer: int, qo_head: int) -> Tensor:
        head, query = divmod(qo_head, self._group)
        return self._keys.build_queries[head, query :: self._group]


def build_layer(
    synthetic: SyntheticKeys,
    heads: Heads,
    config: IndexConfig,
    *,
    exact: NearestKeys,
    target_recall: float,
    device: torch.device,
    workers: int,
    threads: int,
) -> BuiltLayer:
    """Indexes of all distinct heads, built by ``workers`` threads, at the least effort with recall
    ``target_recall`` of the keys of ``exact``."""
    unit_heads = Heads(1, heads.group * synthetic.distinct, synthetic.distinct)
    start = time.perf_counter()
    index = build_segment(
        _OneLayer(synthetic, heads.group), synthetic.keys.shape[1], unit_heads, config,
        device=device, workers=workers,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    units = [index.units[0, head] for head in range(synthetic.distinct)]
    num_queries = synthetic.test_queries.shape[1]
    unit_of_query = [unit for unit in units for _ in range(num_queries)]
    queries = synthetic.test_queries[: synthetic.distinct].flatten(0, 1)

    def run_at(effort: int) -> tuple[float, float]:
        count = exact.ids.shape[1]
        hits, _ = search_each(unit_of_query, queries, count, effort=effort, threads=threads)
        scanned = float(hits.scanned.double().mean()) / len(units[0])
        return recall_of(Hits(*hits), exact), scanned

    effort = _least_effort(units[0], exact.ids.shape[1], target_recall, run_at)
    for unit in units:
        unit.effort = effort
    return BuiltLayer(index, seconds, *run_at(effort))


def _least_effort(index: KVIndex, count: int, target_recall: float, run_at: EffortRun) -> int:
    if index.kind == "flat":
        return 0
    low, high = 1, 64
    if index.kind == "graph":
        # the range in which a graph search can meet `count`
        low, high = (count + 1) // 2, count
    while run_at(high)[0] < target_recall and high < len(index):
        low, high = high, 2 * high
    while high - low > max(1, high // 64):
        middle = (low + high) // 2
        low, high = (low, middle) if run_at(middle)[0] >= target_recall else (middle, high)
    return high


class CycledLayers:
    """``num_layers`` layers of a segment over the memory of fewer: layer n reads copy n modulo
    ``copies`` of ``kv``, ``[copies, 2, kv_heads, tokens, head_dim]``. Copies exceed the caches."""

    def __init__(self, kv: Tensor, num_layers: int) -> None:
        self._kv, self._num_layers = kv, num_layers
        self.shape = (num_layers, *kv.shape[1:])

    def __getitem__(self, index: Any) -> Tensor:
        layer, *rest = index if isinstance(index, tuple) else (index,)
        return self._kv[(layer % len(self._kv), *rest)]


def host_layers(
    synthetic: SyntheticKeys, kv: Tensor, built: BuiltLayer, heads: Heads
) -> HostedSegment:
    """A segment of all layers over the filled memory ``kv`` (see `CycledLayers`); each copy of the
    keys has a copy of the indexes of ``built``."""
    copies, _, _, num_tokens, _ = kv.shape
    layer_index = built.index
    layers: Any = CycledLayers(kv, heads.num_layers)
    segment = HostedSegment(SegmentKey(layer_index.config.kind.encode().ljust(32)), num_tokens, kv)
    segment.kv = layers
    segment.filled = num_tokens
    tokens, units = layer_index.indexed, {}
    for layer, head in heads.units(layer_index.config):
        if layer < copies:
            stored = KeyVectors(kv[layer, 0, head, tokens.start : tokens.stop], len(tokens))
            units[layer, head] = _copy(layer_index.units[0, head % synthetic.distinct], stored)
        else:
            units[layer, head] = units[layer % copies, head]
    segment.index = SegmentIndex(layer_index.config, heads, num_tokens, units)
    return segment


def _copy(index: KVIndex, stored: KeyVectors) -> KVIndex:
    keys, source = stored, index.keys
    if source.exact is not None:
        vectors = host_zeros(source.vectors.shape, source.vectors.dtype).copy_(source.vectors)
        scales = None if source.scales is None else source.scales.clone()
        keys = KeyVectors(vectors, len(source), scales, exact=stored)
    copy = type(index)(keys, index.built, index.config, index.effort)
    if isinstance(index, GraphIndex) and isinstance(copy, GraphIndex):
        for name in ("order", "links", "codes"):
            array = getattr(index, name)
            setattr(copy, name, host_zeros(array.shape, array.dtype).copy_(array))
        copy.num_entries, copy.steps = index.num_entries, index.steps
    if isinstance(index, IvfIndex) and isinstance(copy, IvfIndex):
        copy.means, copy.starts = index.means.clone(), index.starts.clone()
        copy.members = index.members.clone()
    return copy


def fill(kv: Tensor, synthetic: SyntheticKeys) -> None:
    """Write the keys to every layer of ``kv``, and the same normal values to all heads."""
    values = torch.randn(synthetic.keys.shape[1:], generator=torch.Generator().manual_seed(1))
    narrow = values.to(kv.dtype)
    for layer in kv:
        layer[0].copy_(synthetic.keys)
        layer[1].copy_(narrow.expand_as(layer[1]))

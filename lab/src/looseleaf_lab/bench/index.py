"""``bench index``: recall@100 against the share of keys compared, for our indexes and others.

Centroids and the steps inside other libraries' graphs count as compared keys. Times are CPU times
of one thread. All indexes get the same keys, build queries and test queries."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from looseleaf.config import IndexConfig, IndexKind
from looseleaf.errors import InvalidOption
from looseleaf.index import KeyVectors, KVIndex, build_index, choose_index, search
from looseleaf.index.base import Hits
from looseleaf.index.choosing import recall_of
from looseleaf.ops.nearest_keys import NearestKeys, nearest_keys
from looseleaf_lab.bench.index_layers import Layer
from looseleaf_lab.bench.progress import SILENT, Progress
from looseleaf_lab.bench.results import Row
from looseleaf_lab.bench.roargraph import build_roargraph
from looseleaf_lab.errors import INSTALL

Search = Callable[[Tensor, int], Hits]
_COUNT = 100


@dataclass(frozen=True)
class Arm:
    """An index and its efforts; ``build`` returns a search and the index bytes per key."""

    name: str
    efforts: Sequence[int]
    build: Callable[[Layer], tuple[Search, float]]


def measure(
    layers: Iterator[Layer],
    config: IndexConfig,
    names: Sequence[str] = (),
    progress: Progress = SILENT,
) -> Iterator[Row]:
    """Rows of every layer, arm and effort, and of the default index.

    ``names`` restricts the arms by the beginnings of their names. Raises InvalidOption for an
    unknown name, and for HNSW without faiss."""
    arms = [arm for arm in _arms(config) if not names or arm.name.startswith(tuple(names))]
    names_of_arms = [arm.name for arm in _arms(config)]
    unknown = [
        name for name in names if not any(arm_name.startswith(name) for arm_name in names_of_arms)
    ]
    if unknown:
        raise InvalidOption(f"unknown index {unknown[0]!r}: use {', '.join(names_of_arms)}")
    if any(arm.build is _build_hnsw for arm in arms) and find_spec("faiss") is None:
        raise InvalidOption(f"bench index needs faiss for HNSW: {INSTALL}")
    for layer in layers:
        progress.stage(f"{layer.name}: {len(layer.keys)} keys, exact neighbours")
        exact = nearest_keys(layer.test_queries, layer.keys, _COUNT)
        for arm in progress.over(arms, lambda arm: arm.name):
            start = time.process_time()
            search_at, bytes_per_key = arm.build(layer)
            seconds = time.process_time() - start
            for effort in progress.over(arm.efforts, lambda effort: f"effort {effort}"):
                row = _search_figures(layer, search_at, effort, exact)
                yield {
                    "layer": layer.name,
                    "keys": len(layer.keys),
                    "head_dim": layer.keys.shape[1],
                    "mismatch": layer.mismatch,
                    "index": arm.name,
                    "effort": effort,
                    **row,
                    "build_s": seconds,
                    "bytes_per_token": bytes_per_key,
                }
        yield _default_row(layer, config, exact)


def _search_figures(
    layer: Layer, search_at: Search, effort: int, exact: NearestKeys
) -> dict[str, float]:
    start = time.process_time()
    hits = search_at(layer.test_queries, effort)
    seconds = time.process_time() - start
    return {
        "recall": recall_of(hits, exact),
        "scanned": float(hits.scanned.double().mean()) / len(layer.keys),
        "ms_per_query": 1e3 * seconds / len(layer.test_queries),
    }


def _default_row(layer: Layer, config: IndexConfig, exact: NearestKeys) -> Row:
    """The default index, chosen on queries that were not used to build it."""
    start = time.process_time()
    choice = choose_index(KeyVectors.create(layer.keys), layer.queries, config)
    seconds = time.process_time() - start
    index = choice.index
    return {
        "layer": layer.name,
        "keys": len(layer.keys),
        "head_dim": layer.keys.shape[1],
        "mismatch": layer.mismatch,
        "index": f"chosen: {index.kind}",
        "effort": index.effort,
        **_search_figures(
            layer, lambda q, effort: search(index, q, _COUNT, effort), index.effort, exact
        ),
        "build_s": seconds,
        "bytes_per_token": index.num_bytes / len(index),
    }


def _arms(config: IndexConfig) -> list[Arm]:
    def ours(kind: IndexKind, **options: Any) -> Callable[[Layer], tuple[Search, float]]:
        def build(layer: Layer) -> tuple[Search, float]:
            arm_config = replace(config, kind=kind, **options)
            keys = KeyVectors.create(layer.keys, arm_config.keys)
            return _search_of(build_index(keys, arm_config, layer.queries))

        return build

    def roargraph(enhanced: bool) -> Callable[[Layer], tuple[Search, float]]:
        def build(layer: Layer) -> tuple[Search, float]:
            num_queries = round(0.1 * len(layer.keys))
            keys = KeyVectors.create(layer.keys)
            return _search_of(build_roargraph(keys, layer.queries[:num_queries], enhanced=enhanced))

        return build

    beams = (100, 150, 200, 300, 400, 800)
    # graphs also compare the neighbours of their candidates
    walks = (50, 77, *beams)
    return [
        Arm("flat", (0,), ours("flat")),
        Arm("ivf", (8, 16, 32, 64, 128, 256, 512), ours("ivf")),
        Arm("graph", walks, ours("graph")),
        Arm("graph, int8 keys", (100, 200), ours("graph", keys="int8")),
        Arm("HNSW (faiss)", beams, _build_hnsw),
        Arm("RoarGraph, projection", (100, 400), roargraph(False)),
        Arm("RoarGraph, enhanced", beams, roargraph(True)),
    ]


def _search_of(index: KVIndex) -> tuple[Search, float]:
    def search_at(queries: Tensor, effort: int) -> Hits:
        return search(index, queries, _COUNT, effort)

    return search_at, index.num_bytes / len(index)


def _build_hnsw(layer: Layer) -> tuple[Search, float]:
    faiss: Any = import_module("faiss")

    faiss.omp_set_num_threads(1)
    dim, edges = layer.keys.shape[1], 32
    graph = faiss.IndexHNSWFlat(dim, edges, faiss.METRIC_INNER_PRODUCT)
    graph.hnsw.efConstruction = 200
    graph.add(layer.keys.numpy())

    def search_at(queries: Tensor, effort: int) -> Hits:
        graph.hnsw.efSearch = effort
        faiss.cvar.hnsw_stats.reset()
        scores, ids = graph.search(queries.numpy(), _COUNT)
        comparisons = faiss.cvar.hnsw_stats.ndis / len(queries)
        scanned = torch.full((len(queries),), int(comparisons))
        return Hits(torch.from_numpy(ids).int(), torch.from_numpy(scores), scanned)

    # two int32 neighbour lists on the lowest level
    return search_at, 4.0 * 2 * edges

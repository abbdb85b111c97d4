"""``bench index``: recall@100 against the share of keys compared, for our indexes and others.

Compared keys count alike, centroids and the steps inside other libraries' graphs too; times are CPU
time of one thread. Everybody gets the same keys, the same queries to build from and others to
answer."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from looseleaf.config import IndexConfig, IndexKind
from looseleaf.errors import InvalidOption, install
from looseleaf.index import KeyVectors, KVIndex, build_index, choose_index, search
from looseleaf.index.base import Hits
from looseleaf.index.choosing import recall_of
from looseleaf.ops.nearest_keys import NearestKeys, nearest_keys
from looseleaf_lab.bench.index_layers import Layer
from looseleaf_lab.bench.progress import SILENT, Progress
from looseleaf_lab.bench.results import Row
from looseleaf_lab.bench.roargraph import build_roargraph

Ask = Callable[[Tensor, int], Hits]
_COUNT = 100


@dataclass(frozen=True)
class Arm:
    """A way to search: ``ask`` takes queries and an effort of ``efforts``."""

    name: str
    efforts: Sequence[int]
    build: Callable[[Layer], tuple[Ask, float]]


def measure(
    layers: Iterator[Layer],
    config: IndexConfig,
    names: Sequence[str] = (),
    progress: Progress = SILENT,
) -> Iterator[Row]:
    """Rows of every layer, arm and effort, and of what is chosen by default.

    With ``names`` only of arms that begin with one of them. Raises InvalidOption for a name that no
    arm has, and without faiss, for HNSW."""
    arms = [arm for arm in _arms(config) if not names or arm.name.startswith(tuple(names))]
    known = [arm.name for arm in _arms(config)]
    wrong = [name for name in names if not any(one.startswith(name) for one in known)]
    if wrong:
        raise InvalidOption(f"unknown index {wrong[0]!r}: there are {', '.join(known)}")
    if any(arm.build is _build_hnsw for arm in arms) and find_spec("faiss") is None:
        raise InvalidOption(f"bench index needs faiss for HNSW: {install('bench')}")
    for layer in layers:
        progress.stage(f"{layer.name}: {len(layer.keys)} keys, exact neighbours")
        exact = nearest_keys(layer.asked, layer.keys, _COUNT)
        for arm in progress.over(arms, lambda arm: arm.name):
            start = time.process_time()
            ask, bytes_per_key = arm.build(layer)
            seconds = time.process_time() - start
            for effort in progress.over(arm.efforts, lambda effort: f"effort {effort}"):
                row = _ask(layer, ask, effort, exact)
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
        yield _chosen(layer, config, exact)


def _ask(layer: Layer, ask: Ask, effort: int, exact: NearestKeys) -> dict[str, float]:
    start = time.process_time()
    hits = ask(layer.asked, effort)
    seconds = time.process_time() - start
    return {
        "recall": recall_of(hits, exact),
        "scanned": float(hits.scanned.double().mean()) / len(layer.keys),
        "ms_per_query": 1e3 * seconds / len(layer.asked),
    }


def _chosen(layer: Layer, config: IndexConfig, exact: NearestKeys) -> Row:
    """What the default takes: chosen on queries held out of those to build from."""
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
        **_ask(layer, lambda q, effort: search(index, q, _COUNT, effort), index.effort, exact),
        "build_s": seconds,
        "bytes_per_token": index.num_bytes / len(index),
    }


def _arms(config: IndexConfig) -> list[Arm]:
    def ours(kind: IndexKind, **options: Any) -> Callable[[Layer], tuple[Ask, float]]:
        def build(layer: Layer) -> tuple[Ask, float]:
            changed = replace(config, kind=kind, **options)
            keys = KeyVectors.create(layer.keys, changed.keys)
            return _asking(build_index(keys, changed, layer.queries))

        return build

    def roargraph(enhanced: bool) -> Callable[[Layer], tuple[Ask, float]]:
        def build(layer: Layer) -> tuple[Ask, float]:
            wanted = round(0.1 * len(layer.keys))
            keys = KeyVectors.create(layer.keys)
            return _asking(build_roargraph(keys, layer.queries[:wanted], enhanced=enhanced))

        return build

    beams = (100, 150, 200, 300, 400, 800)
    # a graph also meets what its candidates are joined to
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


def _asking(index: KVIndex) -> tuple[Ask, float]:
    def ask(queries: Tensor, effort: int) -> Hits:
        return search(index, queries, _COUNT, effort)

    return ask, index.num_bytes / len(index)


def _build_hnsw(layer: Layer) -> tuple[Ask, float]:
    faiss: Any = import_module("faiss")

    faiss.omp_set_num_threads(1)
    dim, edges = layer.keys.shape[1], 32
    graph = faiss.IndexHNSWFlat(dim, edges, faiss.METRIC_INNER_PRODUCT)
    graph.hnsw.efConstruction = 200
    graph.add(layer.keys.numpy())

    def ask(queries: Tensor, effort: int) -> Hits:
        graph.hnsw.efSearch = effort
        faiss.cvar.hnsw_stats.reset()
        scores, ids = graph.search(queries.numpy(), _COUNT)
        compared = faiss.cvar.hnsw_stats.ndis / len(queries)
        scanned = torch.full((len(queries),), int(compared))
        return Hits(torch.from_numpy(ids).int(), torch.from_numpy(scores), scanned)

    # two neighbours' lists on the lowest level, as int32
    return ask, 4.0 * 2 * edges

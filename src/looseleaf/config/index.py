"""The configuration of a segment's vector index: kind, dtype of keys, structure sizes."""

from dataclasses import dataclass
from typing import Literal

from looseleaf.config.option import (
    option,
    require,
    require_kinds,
    require_not_negative,
    require_positive,
    require_share,
)

IndexKind = Literal["auto", "flat", "ivf", "graph"]
IndexKeys = Literal["stored", "float32", "float16", "bfloat16", "int8"]
IndexPer = Literal["kv_head", "query_head"]


@dataclass(frozen=True)
class IndexConfig:
    """The vector index of a segment.

    Cluster sizes are RetroInfer's; graph sizes are from RetrievalAttention and measurements of this
    project (docs/retrieval.md). Raises InvalidOption for values out of range."""

    kind: IndexKind = option(
        "auto",
        "flat (compares all keys), ivf (clusters), graph, or auto: the fastest kind with the "
        "required recall, measured for each head",
    )
    recall: float = option(0.95, "auto: required share of the nearest keys among the hits")
    per: IndexPer = option("kv_head", "one index per KV head (kv_head) or query head (query_head)")
    keys: IndexKeys = option(
        "stored",
        "dtype of compared keys: stored (the segment's own keys), or that of a copy",
    )
    sink: int = option(16, "first tokens of a segment, which are always read and not indexed")
    local: int = option(64, "last tokens of a segment, which are always read and not indexed")
    sample: float = option(0.2, "graph: number of training queries, as a share of the keys")
    top: int = option(
        100, "graph: length of a training query's list of nearest keys; auto: hits of a search"
    )
    readers: int = option(4, "graph: training queries whose lists are a key's candidates")
    degree: int = option(
        48, "graph: forward edges of a key; reverse edges add up to two for every three"
    )
    cluster_size: int = option(16, "ivf: mean number of keys of a cluster")
    span: int = option(8192, "ivf: keys that are clustered together")
    iterations: int = option(10, "ivf: iterations of k-means")
    estimate: bool = option(
        False, "ivf: represent keys without a hit by the mean key and value of their cluster"
    )
    seed: int = option(0, "seed of the query sample and of k-means")

    def __post_init__(self) -> None:
        require_kinds(self)
        require_not_negative(self, "sink", "local")
        require_share(self, "recall", "sample")
        require_positive(self, "top", "readers", "degree", "cluster_size", "span", "iterations")
        require(
            self.span >= self.cluster_size,
            f"span={self.span} must be at least cluster_size={self.cluster_size}",
            "span",
            "cluster_size",
        )
        require(
            not self.estimate or self.kind == "ivf",
            f"estimate needs clusters: give kind 'ivf', not {self.kind!r}",
            "estimate",
            "kind",
        )

"""How the vector index of a segment is made: kind, stored keys, and the sizes of its structure."""

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
    """One index a KV head, or one a query head over the same keys.

    Sizes of clusters are RetroInfer's, those of the graph from RetrievalAttention and our own
    measurements (docs/retrieval.md)."""

    kind: IndexKind = option(
        "auto",
        "flat (compares all keys), ivf (clusters), graph, or auto: what is fastest at the recall "
        "that is wanted, measured head by head",
    )
    recall: float = option(0.95, "auto: the share of the nearest keys that must be found")
    per: IndexPer = option("kv_head", "kv_head: one index a KV head; query_head: one a query head")
    keys: IndexKeys = option(
        "stored",
        "the dtype that keys are compared in: stored reads the segment's own, any other is a copy",
    )
    sink: int = option(16, "first tokens of a segment, which are always read and not indexed")
    local: int = option(64, "last tokens of a segment, which are always read and not indexed")
    sample: float = option(0.2, "graph: queries to learn from, as a share of the keys")
    top: int = option(
        100, "graph: keys that each of these queries finds; auto: keys that are to be found"
    )
    readers: int = option(4, "graph: queries whose finds become a key's candidates")
    degree: int = option(
        48, "graph: edges that a key chooses; two reverse ones for every three come on top"
    )
    cluster_size: int = option(16, "ivf: keys of a cluster on average")
    span: int = option(8192, "ivf: keys that are clustered together")
    iterations: int = option(10, "ivf: rounds of k-means")
    estimate: bool = option(
        False, "ivf: keys that are not found count by the mean key and mean value of their cluster"
    )
    seed: int = option(0, "of the sampled queries and of k-means")

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
            f"estimate is by clusters: give kind 'ivf', not {self.kind!r}",
            "estimate",
            "kind",
        )

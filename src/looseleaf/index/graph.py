"""The graph index of RetrievalAttention (arXiv 2409.10516), with edges learned from queries.

Attention queries are out of the distribution of keys, so nearest neighbours among keys misguide
searches. Edges therefore join keys that the same prefill queries attend to (RoarGraph's
projection). Three rules differ from the published ones, whose recall is low on attention data:

- The candidates of a key come from several queries with that key in their exact top list, not only
  from the last query whose nearest key it is.
- Searches enter at the key that is most often the nearest, at one key of every part unreachable
  from there, and at keys in many top lists.
- If a key lacks room for all reverse edges, edges to keys in many top lists take precedence.

Vertices are numbered in breadth-first order and have 4-bit codes. A walk compares codes, then
rescores the best candidates by their keys. Codes of entry points are contiguous, so comparing them
is cheap, and walks that begin at the best entry point are shorter."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.config.index import IndexConfig
from looseleaf.errors import InvalidOption
from looseleaf.index.base import CPU, Arrays, KVIndex, require_queries
from looseleaf.index.codes import encode
from looseleaf.index.keys import KeyVectors
from looseleaf.index.projection import entries_of, order_of, project
from looseleaf.ops.native.host_memory import host_zeros
from looseleaf.ops.nearest_keys import nearest_keys

_EFFORT = 200
# vertices whose links are renumbered per iteration, which bounds the memory of copies
_ROWS = 1 << 16


class GraphIndex(KVIndex):
    """A graph of keys. Vertex v is key ``order[v]`` (int32); vertices are in breadth-first order.

    The first ``num_entries`` vertices are the entry points of searches. ``links`` is int32
    ``[vertices, edges]``, vertex numbers, each row ended by -1. ``codes`` and ``steps`` are the
    results of `encode`. ``effort`` is the number of expanded candidates; a search for n keys
    expands at least n / 2. Keys in no query's top list have no edges, are no vertices and are never
    returned by a walk."""

    kind = "graph"
    order: Tensor
    links: Tensor
    num_entries: int
    codes: Tensor
    steps: Tensor

    @classmethod
    def build(
        cls,
        keys: KeyVectors,
        queries: Float[Tensor, "queries head_dim"],
        config: IndexConfig,
        device: torch.device = CPU,
        threads: int | None = None,
    ) -> "GraphIndex":
        """A graph that joins keys in the top lists of the same ``queries``, in the keys' frame.

        ``device`` computes top lists and codes; edges take ``threads`` threads, by default
        PyTorch's number. Raises InvalidOption without queries."""
        if len(queries) == 0 and len(keys):
            raise InvalidOption("a graph learns from queries: give some, or build an ivf index")
        index = cls(keys, len(keys), config, _EFFORT)
        width = _width(config)
        if len(keys) == 0:
            entries = torch.empty(0, dtype=torch.int32)
            index.arrange(torch.empty(0, width, dtype=torch.int32), entries, queries)
            return index
        sample = sample_queries(require_queries(queries, keys.head_dim), len(keys), config)
        lists = nearest_keys(sample.to(device), keys.wide(device), config.top).ids
        readers = readers_of(lists, len(keys), config.readers).cpu()
        firsts, frequencies = _counts(lists[:, 0], len(keys)), _counts(lists, len(keys))
        lists = lists.cpu()
        links = project(keys, lists, readers, frequencies, config.degree, width, threads)
        cover = covering(lists, len(keys))
        reaching = entries_of(keys, links, firsts)
        entries = torch.cat((cover, reaching[~torch.isin(reaching, cover)]))
        index.arrange(links, entries, sample, device)
        return index

    def arrange(
        self,
        links: Int[Tensor, "keys edges"],
        entries: Int[Tensor, " entries"],
        queries: Float[Tensor, "queries head_dim"],
        device: torch.device = CPU,
    ) -> None:
        """Set the graph from ``links`` between keys, ended by -1, and the keys ``entries``.

        Codes are optimised for ``queries`` on ``device``. Unreachable keys are left out."""
        self.order = order_of(self.keys, links, entries)
        self.num_entries = len(entries)
        vertices = np.full(len(links) + 1, -1, dtype=np.int32)
        vertices[self.order.numpy()] = np.arange(len(self.order), dtype=np.int32)
        most = int((links >= 0).sum(1).max()) if len(links) else 0
        # a multiple of cache lines
        width = min(-(-most // 16) * 16, links.shape[1])
        self.links = host_zeros((len(self.order), width), torch.int32)
        for first in range(0, len(self.order), _ROWS):
            own = links[self.order[first : first + _ROWS].long(), :width].numpy()
            # -1 selects the last element of the table, which is -1
            self.links[first : first + _ROWS] = torch.from_numpy(vertices[own])
        self.codes, self.steps = encode(self.keys.source, self.order, queries, device)

    def structure(self) -> Arrays:
        links = self.links.numpy()
        narrow = len(links) <= np.iinfo(np.uint16).max
        return {
            "order": self.order.numpy(),
            # -1 becomes 65,535, which is no vertex
            "links": links.astype(np.uint16) if narrow else links,
            "entries": np.array([self.num_entries], dtype=np.int64),
            "codes": self.codes.numpy(),
            "steps": self.steps.numpy(),
        }

    @classmethod
    def load(cls, arrays: Arrays, keys: KeyVectors, config: IndexConfig) -> "GraphIndex":
        if "links" in arrays and "codes" not in arrays:
            raise InvalidOption("a graph index of an earlier version has no codes: build it again")
        built, effort, head_dim = (int(n) for n in arrays["sizes"])
        links: npt.NDArray[Any] = np.array(arrays["links"])
        if links.dtype == np.uint16:
            links = np.where(links == np.iinfo(np.uint16).max, -1, links.astype(np.int32))
        index = cls(keys, built, config, effort)
        index.links = _huge(links, np.int32)
        index.order = _huge(arrays["order"], np.int32)
        index.codes = _huge(arrays["codes"], np.uint8)
        index.steps = torch.from_numpy(np.array(arrays["steps"], dtype=np.float32))
        (index.num_entries,) = (int(n) for n in arrays["entries"])
        num, order = len(links), index.order.numpy()
        shapes = (num,), (num, (head_dim + 1) // 2), (head_dim,)
        fits = (order.shape, tuple(index.codes.shape), tuple(index.steps.shape)) == shapes
        fits = fits and min(num, built, 1) <= index.num_entries <= num
        for numbers, most in ((order, built), (links, num)):
            fits = fits and numbers.min(initial=-1) >= -1 and numbers.max(initial=-1) < most
        if not fits or (order < 0).any():
            raise InvalidOption("the arrays of a graph index do not fit together: build it again")
        return index


def _width(config: IndexConfig) -> int:
    """Most edges of a key: ``degree`` and two reverse ones for every three, in cache lines."""
    return -(-config.degree * 5 // 48) * 16


def _counts(ids: Tensor, num_keys: int) -> Int[Tensor, " keys"]:
    """Occurrences of each key in ``ids``; -1 is padding."""
    return ids[ids >= 0].long().bincount(minlength=num_keys).cpu()


def _huge(array: np.ndarray, dtype: type[np.generic]) -> Tensor:
    source = torch.from_numpy(np.ascontiguousarray(array, dtype=dtype))
    return host_zeros(source.shape, source.dtype).copy_(source)


def sample_queries(
    queries: Float[Tensor, "queries head_dim"], num_keys: int, config: IndexConfig
) -> Float[Tensor, "sampled head_dim"]:
    """``config.sample * num_keys`` queries drawn without replacement; all if there are fewer."""
    size = max(1, round(config.sample * num_keys))
    if size >= len(queries):
        return queries
    generator = torch.Generator().manual_seed(config.seed)
    return queries[torch.randperm(len(queries), generator=generator)[:size]]


def readers_of(
    lists: Int[Tensor, "queries top"], num_keys: int, most: int
) -> Int[Tensor, "keys readers"]:
    """For each key the ``most`` queries that rank it highest in ``lists``, ended by -1."""
    num_queries, top = lists.shape
    # ordered by rank, so that a stable sort by key keeps the order of ranks
    keys = lists.T.flatten().long()
    query = torch.arange(num_queries, dtype=torch.int32, device=lists.device).repeat(top)
    valid = keys >= 0
    keys, order = keys[valid].sort(stable=True)
    query = query[valid][order]
    starts = torch.searchsorted(keys, torch.arange(num_keys, device=lists.device))
    rank = torch.arange(len(keys), device=lists.device) - starts[keys]
    top_ranked = rank < most
    readers = torch.full((num_keys, most), -1, dtype=torch.int32, device=lists.device)
    readers[keys[top_ranked], rank[top_ranked]] = query[top_ranked]
    return readers


_MOST_LISTS = 4096
_KEYS_PER_ENTRY = 2048
_MOST_ENTRIES = 128


def covering(
    lists: Int[Tensor, "queries top"], num_keys: int, most: int | None = None
) -> Int[Tensor, " entries"]:
    """Greedy cover of ``lists``, which are ended by -1: keys in descending order of newly covered
    lists, while a key covers at least two.

    At most ``most`` keys, by default one per 2,048 keys, up to 128."""
    most = min(num_keys // _KEYS_PER_ENTRY, _MOST_ENTRIES) if most is None else most
    sample = lists[:: max(1, -(-len(lists) // _MOST_LISTS))].long()
    keys, order = sample.flatten().sort(stable=True)
    bounds = torch.searchsorted(keys, torch.arange(num_keys + 1))
    # uncovered lists with each key
    counts = bounds.diff()
    uncovered = torch.ones(len(sample), dtype=torch.bool)
    entries: list[int] = []
    while len(entries) < most:
        key = int(counts.argmax())
        if counts[key] < 2:
            break
        entries.append(key)
        covered = order[bounds[key] : bounds[key + 1]] // sample.shape[1]
        covered = covered[uncovered[covered]]
        uncovered[covered] = False
        members = sample[covered].flatten()
        members = members[members >= 0]
        counts.index_add_(0, members, torch.full_like(members, -1))
    return torch.tensor(entries, dtype=torch.int32)

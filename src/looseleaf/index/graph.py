"""A graph whose edges join keys that the same queries read: RetrievalAttention's index, corrected.

Queries of attention are far from the keys, so neighbours among keys lead nowhere. Here the queries
of the segment's own prefill say which keys belong together: each finds its exact top keys, and keys
found together are joined (RoarGraph's projection). Two things differ from the published rule, which
finds nothing on such data: a key's candidates come from *all* queries that found it, up to four,
not from the last whose nearest it was; and the search begins at the key that is most often the
nearest, not at the one nearest to the mean, at one key of every part that can't be reached from
there, and at keys that many queries found. And of the edges back to a key's choosers, for which
there is no room for all, those to the keys that most queries found are kept: what was found often
is found again.

What joins the graph is named anew, in the order in which a search meets it, and has a code: a
search walks by codes, a quarter of a key's bytes, and reads the keys of the best that it met."""

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
from looseleaf.index.entries import covering
from looseleaf.index.keys import KeyVectors
from looseleaf.index.projection import entries_of, order_of, project
from looseleaf.ops.native.host_memory import host_zeros
from looseleaf.ops.nearest_keys import nearest_keys

_EFFORT = 200
# whose links are renamed at a time
_ROWS = 1 << 16


class GraphIndex(KVIndex):
    """Vertex v is key ``order[v]`` (int32), in the order in which a search that looks behind
    everything meets them, from the first ``num_entries`` on. ``links`` is int32 ``[vertices,
    edges]``, neighbouring vertices, each row ended by -1; ``codes`` and ``steps`` are `encode`'s;
    ``effort`` is the number of candidates that a search looks behind, at least half of the keys
    that it wants.

    A key that no query of the sample found has no edges, is no vertex and is not found either."""

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
        """Join the keys that ``queries``, in the keys' frame, find together; ``device`` compares,
        ``threads`` threads, by default PyTorch's, do the rest.

        Raises InvalidOption without any query."""
        if len(queries) == 0 and len(keys):
            raise InvalidOption("a graph learns from queries: give some, or build an ivf index")
        index = cls(keys, len(keys), config, _EFFORT)
        if len(keys) == 0:
            none = torch.empty(0, dtype=torch.int32)
            links = torch.empty(0, _width(config), dtype=torch.int32)
            index.arrange(links, none, queries)
            return index
        sampled = sample_queries(require_queries(queries, keys.head_dim), len(keys), config)
        lists = nearest_keys(sampled.to(device), keys.wide(device), config.top).ids
        readers = readers_of(lists, len(keys), config.readers).cpu()
        firsts, found = (_count(some, len(keys)) for some in (lists[:, 0], lists))
        width = _width(config)
        lists = lists.cpu()
        links = project(keys, lists, readers, found, config.degree, width, threads)
        begin = covering(lists, len(keys))
        reach = entries_of(keys, links, firsts)
        entries = torch.cat((begin, reach[~torch.isin(reach, begin)]))
        index.arrange(links, entries, sampled, device)
        return index

    def arrange(
        self,
        links: Int[Tensor, "keys edges"],
        entries: Int[Tensor, " entries"],
        queries: Float[Tensor, "queries head_dim"],
        device: torch.device = CPU,
    ) -> None:
        """Make the graph of ``links`` between keys, ended by -1, and of where searches begin, with
        codes for such ``queries`` made on ``device``.

        Keys that can't be reached from there are no part of it."""
        self.order = order_of(self.keys, links, entries)
        self.num_entries = len(entries)
        vertices = np.full(len(links) + 1, -1, dtype=np.int32)
        vertices[self.order.numpy()] = np.arange(len(self.order), dtype=np.int32)
        most = int((links >= 0).sum(1).max()) if len(links) else 0
        # whole lines of memory
        width = min(-(-most // 16) * 16, links.shape[1])
        self.links = host_zeros((len(self.order), width), torch.int32)
        for first in range(0, len(self.order), _ROWS):
            own = links[self.order[first : first + _ROWS].long(), :width].numpy()
            # -1 names the last of the table, which is no vertex
            self.links[first : first + _ROWS] = torch.from_numpy(vertices[own])
        self.codes, self.steps = encode(self.keys.source, self.order, queries, device)

    def structure(self) -> Arrays:
        links = self.links.numpy()
        narrow = len(links) <= np.iinfo(np.uint16).max
        return {
            "order": self.order.numpy(),
            # -1 becomes the largest number, which is no vertex
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
        for names, most in ((order, built), (links, num)):
            fits = fits and names.min(initial=-1) >= -1 and names.max(initial=-1) < most
        if not fits or (order < 0).any():
            raise InvalidOption("the arrays of a graph index do not fit together: build it again")
        return index


def _width(config: IndexConfig) -> int:
    """Edges of a key: those it chooses and two back for three of them, in whole lines of memory."""
    return -(-config.degree * 5 // 48) * 16


def _count(found: Tensor, num_keys: int) -> Int[Tensor, " keys"]:
    """How often each key was found; -1 is none."""
    return found[found >= 0].long().bincount(minlength=num_keys).cpu()


def _huge(array: np.ndarray, dtype: type[np.generic]) -> Tensor:
    source = torch.from_numpy(np.ascontiguousarray(array, dtype=dtype))
    return host_zeros(source.shape, source.dtype).copy_(source)


def sample_queries(
    queries: Float[Tensor, "queries head_dim"], num_keys: int, config: IndexConfig
) -> Float[Tensor, "sampled head_dim"]:
    """A share of ``num_keys`` queries, drawn without replacement: all if there are fewer."""
    wanted = max(1, round(config.sample * num_keys))
    if wanted >= len(queries):
        return queries
    generator = torch.Generator().manual_seed(config.seed)
    return queries[torch.randperm(len(queries), generator=generator)[:wanted]]


def readers_of(
    lists: Int[Tensor, "queries top"], num_keys: int, most: int
) -> Int[Tensor, "keys readers"]:
    """For each key the queries that found it, those that ranked it highest first, ended by -1."""
    num_queries, top = lists.shape
    # rank by rank, so that a stable sort by key leaves them in the order of their ranks
    keys = lists.T.flatten().long()
    query = torch.arange(num_queries, dtype=torch.int32, device=lists.device).repeat(top)
    found = keys >= 0
    keys, order = keys[found].sort(stable=True)
    query = query[found][order]
    starts = torch.searchsorted(keys, torch.arange(num_keys, device=lists.device))
    place = torch.arange(len(keys), device=lists.device) - starts[keys]
    kept = place < most
    readers = torch.full((num_keys, most), -1, dtype=torch.int32, device=lists.device)
    readers[keys[kept], place[kept]] = query[kept]
    return readers

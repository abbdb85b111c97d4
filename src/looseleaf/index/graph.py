"""A graph whose edges join keys that the same queries read: RetrievalAttention's index, corrected.

Queries of attention are far from the keys, so neighbours among keys lead nowhere. Here the queries
of the segment's own prefill say which keys belong together: each finds its exact top keys, and keys
found together are joined (RoarGraph's projection). Two things differ from the published rule, which
finds nothing on such data: a key's candidates come from *all* queries that found it, up to eight,
not from the last whose nearest it was; and the search begins at the key that is most often the
nearest, not at the one nearest to the mean, and at one key of every part that can't be reached from
there."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.config.index import IndexConfig
from looseleaf.errors import InvalidOption
from looseleaf.index.base import CPU, Arrays, KVIndex, require_queries
from looseleaf.index.keys import KeyVectors
from looseleaf.index.projection import entries_of, project
from looseleaf.ops.host_memory import host_zeros
from looseleaf.ops.nearest_keys import nearest_keys

_EFFORT = 200


class GraphIndex(KVIndex):
    """``links`` is int32 ``[keys, 2 * degree]``, each row ended by -1; ``effort`` the number of
    candidates that a search keeps; ``entries`` are the keys that it begins at, int32.

    A key that no query of the sample found has no edges and is not found either."""

    kind = "graph"
    links: Tensor
    entries: Tensor

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
            index.entries = torch.empty(0, dtype=torch.int32)
            index.links = torch.empty(0, 2 * config.degree, dtype=torch.int32)
            return index
        sampled = sample_queries(require_queries(queries, keys.head_dim), len(keys), config)
        lists = nearest_keys(sampled.to(device), keys.wide(device), config.top).ids
        readers = readers_of(lists, len(keys), config.readers).cpu()
        lists = lists.cpu()
        firsts = lists[:, 0][lists[:, 0] >= 0].long().bincount(minlength=len(keys))
        index.links = project(keys, lists, readers, config.degree, threads)
        index.entries = entries_of(keys, index.links, firsts)
        return index

    def structure(self) -> Arrays:
        width = int((self.links >= 0).sum(1).max()) if len(self.links) else 0
        links = self.links[:, :width].numpy()
        narrow = self.built <= np.iinfo(np.uint16).max
        return {
            # -1 becomes the largest number, which is no key
            "links": links.astype(np.uint16) if narrow else np.ascontiguousarray(links),
            "entries": self.entries.numpy(),
        }

    @classmethod
    def load(cls, arrays: Arrays, keys: KeyVectors, config: IndexConfig) -> "GraphIndex":
        built, effort, _ = (int(n) for n in arrays["sizes"])
        links = np.array(arrays["links"])
        if links.dtype == np.uint16:
            links = np.where(links == np.iinfo(np.uint16).max, -1, links.astype(np.int32))
        index = cls(keys, built, config, effort)
        index.entries = torch.from_numpy(np.array(arrays["entries"], dtype=np.int32))
        index.links = host_zeros(links.shape, torch.int32)
        index.links.copy_(torch.from_numpy(np.ascontiguousarray(links, dtype=np.int32)))
        if len(links) != built or (links.size and not -1 <= links.min() <= links.max() < built):
            raise InvalidOption("the arrays of a graph index do not fit together: build it again")
        entries = index.entries.tolist()
        if (built and not entries) or any(not 0 <= entry < built for entry in entries):
            raise InvalidOption("a graph index begins outside of its keys: build it again")
        return index


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

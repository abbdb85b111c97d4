"""RoarGraph as it is published (VLDB 2024), for comparison: it finds little where queries differ
from keys as they do in attention.

A query's nearest key is its pivot and the other keys it found the candidates; a later query
overwrites an earlier one's. The search begins at the key nearest to the keys' mean. The enhancement
searches from every key and joins it with what was found; it is done 2,048 keys at a time."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.config import IndexConfig
from looseleaf.index import GraphIndex, KeyVectors, search
from looseleaf.index.projection import project
from looseleaf.ops.nearest_keys import nearest_keys

_DEGREE = 35
_TOP = 100
_BEAM = 500
_BATCH = 2048


def build_roargraph(
    keys: KeyVectors, queries: Float[Tensor, "queries head_dim"], *, enhanced: bool
) -> GraphIndex:
    """The projection alone, or with its connectivity enhancement."""
    vectors = keys.gather(slice(0, None))
    lists = nearest_keys(queries, vectors, _TOP).ids
    readers = torch.full((len(keys), 1), -1, dtype=torch.int32)
    for query, pivot in enumerate(lists[:, 0].tolist()):
        readers[pivot] = query
    index = GraphIndex(keys, len(keys), IndexConfig("graph", degree=_DEGREE), _TOP)
    nobody = torch.zeros(len(keys), dtype=torch.int64)
    links = project(keys, lists, readers, nobody, _DEGREE, 2 * _DEGREE)
    entries = (vectors - vectors.mean(0)).norm(dim=1).argmin()[None].to(torch.int32)
    index.arrange(links, entries, queries)
    if enhanced:
        for first in range(0, len(keys), _BATCH):
            _enhance(index, links, torch.arange(first, min(first + _BATCH, len(keys))))
            index.arrange(links, entries, queries)
    return index


def _enhance(
    index: GraphIndex, links: Int[Tensor, "keys edges"], batch: Int[Tensor, " batch"]
) -> None:
    """Join some keys with what a search for them finds now."""
    found = search(index, index.keys.gather(batch), _BEAM, _BEAM).ids
    readers = torch.full((len(index.keys), 1), -1, dtype=torch.int32)
    readers[batch, 0] = torch.arange(len(batch), dtype=torch.int32)
    nobody = torch.zeros(len(index.keys), dtype=torch.int64)
    new = project(index.keys, found, readers, nobody, _DEGREE, 2 * _DEGREE).numpy()
    old = links.numpy()
    for key in np.flatnonzero((new >= 0).any(1)):
        row = old[key][old[key] >= 0]
        more = new[key][new[key] >= 0]
        more = more[~np.isin(more, row)]
        both = np.concatenate((row, more))[: old.shape[1]]
        old[key, : len(both)] = both

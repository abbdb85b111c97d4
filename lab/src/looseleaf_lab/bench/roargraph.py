"""RoarGraph as published (VLDB 2024), for comparison: its recall is low for the query mismatch of
attention.

A query's nearest key is its pivot; its other nearest keys are the candidates. A later query
replaces an earlier one of the same pivot. The search begins at the key nearest to the mean of the
keys. The enhancement searches from every key and links it with the results, in batches of 2,048
keys."""

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
    no_reader = torch.zeros(len(keys), dtype=torch.int64)
    links = project(keys, lists, readers, no_reader, _DEGREE, 2 * _DEGREE)
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
    """Link keys with the current results of a search for them."""
    neighbours = search(index, index.keys.gather(batch), _BEAM, _BEAM).ids
    readers = torch.full((len(index.keys), 1), -1, dtype=torch.int32)
    readers[batch, 0] = torch.arange(len(batch), dtype=torch.int32)
    no_reader = torch.zeros(len(index.keys), dtype=torch.int64)
    new = project(index.keys, neighbours, readers, no_reader, _DEGREE, 2 * _DEGREE).numpy()
    old = links.numpy()
    for key in np.flatnonzero((new >= 0).any(1)):
        row = old[key][old[key] >= 0]
        additions = new[key][new[key] >= 0]
        additions = additions[~np.isin(additions, row)]
        merged = np.concatenate((row, additions))[: old.shape[1]]
        old[key, : len(merged)] = merged

"""Additional entry points of a graph search: keys that cover the top lists of most sampled queries.

Codes of entry points are contiguous, so comparing them is cheap. Walks that begin at the best entry
point are shorter."""

import torch
from jaxtyping import Int
from torch import Tensor

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

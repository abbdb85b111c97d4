"""Where searches in a graph begin besides the keys from which all of it is reached: near them.

Keys that many of the sampled queries found, chosen so that most queries found one of them. Their
codes lie in a row, so to compare them costs little, and a walk from the best of them is shorter."""

import torch
from jaxtyping import Int
from torch import Tensor

# lists that are looked at, and keys for each entry of theirs, at most so many
_LISTS = 4096
_KEYS = 2048
_MOST = 128


def covering(
    lists: Int[Tensor, "queries top"], num_keys: int, most: int | None = None
) -> Int[Tensor, " entries"]:
    """The key that most of ``lists`` have, then the key that most of those have that are without
    any before, and so on, as long as two lists have it; lists are ended by -1.

    ``most`` of them, by default one for every 2,048 keys, up to 128."""
    most = min(num_keys // _KEYS, _MOST) if most is None else most
    some = lists[:: max(1, -(-len(lists) // _LISTS))].long()
    numbers, place = some.flatten().sort(stable=True)
    bounds = torch.searchsorted(numbers, torch.arange(num_keys + 1))
    # how many lists without an entry each key is in
    counts = bounds.diff()
    waiting = torch.ones(len(some), dtype=torch.bool)
    entries: list[int] = []
    while len(entries) < most:
        key = int(counts.argmax())
        if counts[key] < 2:
            break
        entries.append(key)
        own = place[bounds[key] : bounds[key + 1]] // some.shape[1]
        own = own[waiting[own]]
        waiting[own] = False
        left = some[own].flatten()
        left = left[left >= 0]
        counts.index_add_(0, left, torch.full_like(left, -1))
    return torch.tensor(entries, dtype=torch.int32)

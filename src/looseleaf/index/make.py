"""An index of the kind that is asked for: built, or taken back from its arrays."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.config.index import IndexConfig
from looseleaf.errors import InvalidOption
from looseleaf.index.base import CPU, Arrays, KVIndex
from looseleaf.index.flat import FlatIndex
from looseleaf.index.graph import GraphIndex
from looseleaf.index.ivf import IvfIndex
from looseleaf.index.keys import KeyVectors


def build_index(
    keys: KeyVectors,
    config: IndexConfig,
    queries: Float[Tensor, "queries head_dim"] | None = None,
    device: torch.device = CPU,
    threads: int | None = None,
) -> KVIndex:
    """An index over ``keys``; a graph learns from ``queries``, which stand in the keys' frame.

    What compares all keys runs on ``device``, the rest on ``threads`` threads, by default those of
    PyTorch. Kind ``auto`` is `choose_index`'s to build. Raises InvalidOption for a graph without
    queries."""
    if config.kind == "auto":
        raise InvalidOption("kind 'auto' is chosen by measurement: call choose_index")
    if config.kind == "flat":
        return FlatIndex.build(keys, config)
    if config.kind == "ivf":
        return IvfIndex.build(keys, config, device)
    learnt = keys.gather(slice(0, 0)) if queries is None else queries
    return GraphIndex.build(keys, learnt, config, device, threads)


def load_index(arrays: Arrays, keys: KeyVectors, config: IndexConfig) -> KVIndex:
    """The index that `KVIndex.arrays` described, over the same keys.

    Raises InvalidOption if arrays are missing, of another kind than ``config`` says, or do not fit
    the keys."""
    try:
        kind = bytes(np.asarray(arrays["kind"], dtype=np.uint8)).decode()
        built, _, head_dim = (int(n) for n in arrays["sizes"])
        if config.kind not in ("auto", kind):
            raise InvalidOption(f"these are the arrays of an index {kind!r}, not {config.kind!r}")
        if head_dim != keys.head_dim or built > len(keys):
            raise InvalidOption(
                f"the index is over {built} keys of {head_dim} dims, and there are {len(keys)} of "
                f"{keys.head_dim}: it belongs to another segment"
            )
        if kind == "flat":
            return FlatIndex.load(arrays, keys, config)
        return (IvfIndex if kind == "ivf" else GraphIndex).load(arrays, keys, config)
    except (KeyError, ValueError, IndexError) as error:
        if isinstance(error, InvalidOption):
            raise
        raise InvalidOption(f"the arrays of an index are damaged ({error}): build it again") from (
            error
        )

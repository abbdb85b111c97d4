"""Construction of an index of a configured kind: from keys, or from stored arrays."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.config.index import IndexConfig
from looseleaf.errors import InvalidOption
from looseleaf.index.base import CPU, Arrays, FlatIndex, KVIndex
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
    """An index over ``keys``; a graph learns from ``queries``, which are in the keys' frame.

    Exhaustive comparisons run on ``device``, the rest on ``threads`` threads, by default PyTorch's
    number. Raises InvalidOption for kind ``auto`` (see `choose_index`), and for a graph without
    queries."""
    if config.kind == "auto":
        raise InvalidOption("kind 'auto' is chosen by measurement: call choose_index")
    if config.kind == "flat":
        return FlatIndex.build(keys, config)
    if config.kind == "ivf":
        return IvfIndex.build(keys, config, device)
    samples = keys.gather(slice(0, 0)) if queries is None else queries
    return GraphIndex.build(keys, samples, config, device, threads)


def load_index(arrays: Arrays, keys: KeyVectors, config: IndexConfig) -> KVIndex:
    """The inverse of `KVIndex.arrays`, over the same keys.

    Raises InvalidOption if arrays are missing, of another kind than ``config.kind``, or do not fit
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

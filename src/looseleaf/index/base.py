"""The base class of indexes: a structure over keys, searched by inner product, saved as arrays.

The exhaustive index, whose searches compare every key, is the baseline of the others."""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.config.index import IndexConfig
from looseleaf.errors import InvalidOption
from looseleaf.index.keys import KeyVectors

CPU = torch.device("cpu")
Arrays = dict[str, npt.NDArray[np.generic]]


class Hits(NamedTuple):
    """Search results: ``ids`` int32 and ``scores`` fp32 ``[queries, count]``, best first.

    Unused entries are -1 and -inf. ``scanned`` int64 ``[queries]`` counts the compared keys and
    centroids."""

    ids: Tensor
    scores: Tensor
    scanned: Tensor


class KVIndex(ABC):
    """An index over ``keys``, of which the first ``built`` are in its structure.

    Searches compare newer keys exhaustively until `fold` adds them, so inserted keys are never
    missed. ``effort`` is the default search effort: opened clusters, or expanded candidates. A
    search for ``len(index)`` keys returns all keys. Searches (`looseleaf.index.searching`) are
    thread-safe; changes are not.
    """

    kind: ClassVar[str]

    def __init__(self, keys: KeyVectors, built: int, config: IndexConfig, effort: int) -> None:
        self.keys = keys
        self.built = built
        self.config = config
        self.effort = effort

    def __len__(self) -> int:
        return len(self.keys)

    def insert(self, new: Float[Tensor, "keys head_dim"]) -> None:
        """Append keys, which searches compare exhaustively. Raises InvalidOption unless finite."""
        self.keys.append(new)

    @property
    def num_bytes(self) -> int:
        """Bytes of the structure and of key copies, without the stored keys."""
        return sum(array.nbytes for array in self.structure().values()) + self.keys.num_copied_bytes

    @abstractmethod
    def structure(self) -> Arrays:
        """The arrays of the structure, without keys and sizes."""

    def arrays(self) -> Arrays:
        """The index as named arrays, without the keys; the input of `load`."""
        sizes = np.array([self.built, self.effort, self.keys.head_dim], dtype=np.int64)
        kind = np.frombuffer(self.kind.encode(), np.uint8)
        return {"kind": kind, "sizes": sizes, **self.structure()}


def require_queries(queries: Tensor, head_dim: int) -> Tensor:
    """Queries in fp32, C-contiguous. Raises InvalidOption for other dims or non-finite values."""
    if queries.shape[-1] != head_dim:
        raise InvalidOption(
            f"queries have {queries.shape[-1]} dims and keys {head_dim}: give queries of one head"
        )
    wide = queries.float().contiguous()
    if not bool(torch.isfinite(wide).all()):
        raise InvalidOption("a query is not finite: remove NaN and infinity")
    return wide


class FlatIndex(KVIndex):
    """Exact search; ``effort`` is ignored."""

    kind = "flat"

    @classmethod
    def build(cls, keys: KeyVectors, config: IndexConfig) -> "FlatIndex":
        """An index over ``keys``, without a structure."""
        return cls(keys, 0, config, 0)

    def structure(self) -> Arrays:
        return {}

    @classmethod
    def load(cls, arrays: Arrays, keys: KeyVectors, config: IndexConfig) -> "FlatIndex":
        return cls(keys, 0, config, 0)

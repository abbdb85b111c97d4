"""What every index is: a structure over keys, searched by inner product, saved as named arrays."""

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
    """What searches found: ``ids`` int32 and ``scores`` fp32 ``[queries, count]``, best first,
    ended by -1 and -inf; ``scanned`` int64 ``[queries]``, the vectors that were compared, keys and
    centroids.
    """

    ids: Tensor
    scores: Tensor
    scanned: Tensor


class KVIndex(ABC):
    """An index over ``keys``, of which the first ``built`` are in its structure.

    Newer ones are compared one by one until `fold` takes them in, so a hit is never missed because
    it is new. ``effort`` is how hard a search tries unless told otherwise: clusters opened, or
    candidates kept. A search for as many keys as there are finds all of them, whatever the kind.
    Searching (`looseleaf.index.searching`) is safe from many threads; changing is not.
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
        """More keys, found exactly from now on. Raises InvalidOption if one is not finite."""
        self.keys.append(new)

    @property
    def num_bytes(self) -> int:
        """Bytes beside the keys that are stored anyway."""
        return sum(array.nbytes for array in self.structure().values()) + self.keys.num_copied_bytes

    @abstractmethod
    def structure(self) -> Arrays:
        """The arrays besides keys and sizes."""

    def arrays(self) -> Arrays:
        """The index as named arrays, without the keys; `load` takes them back."""
        sizes = np.array([self.built, self.effort, self.keys.head_dim], dtype=np.int64)
        kind = np.frombuffer(self.kind.encode(), np.uint8)
        return {"kind": kind, "sizes": sizes, **self.structure()}


def require_queries(queries: Tensor, head_dim: int) -> Tensor:
    """Queries as the searches read them: fp32, rows in one piece."""
    if queries.shape[-1] != head_dim:
        raise InvalidOption(f"queries have {queries.shape[-1]} dims and keys {head_dim}")
    wide = queries.float().contiguous()
    if not bool(torch.isfinite(wide).all()):
        raise InvalidOption("a query is not finite: nothing can be compared with it")
    return wide

"""The first tokens of every document (EPIC's LegoLink-k).

A document that was encoded alone has an attention sink in its first tokens, which is wrong inside a
prompt. A request's first document is usually exact, and then has no candidates."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.blend.candidates import Candidates
from looseleaf.blend.selectors.base import Selector
from looseleaf.errors import InvalidOption

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FirstK(Selector):
    """Chooses the first ``k`` tokens of each document, or a ``share`` of them, rounded down."""

    k: int = 16
    share: float | None = None

    def __post_init__(self) -> None:
        if self.k < 0:
            raise InvalidOption(f"first-k takes 0 or more tokens of a document, not {self.k}")
        if self.share is not None and not 0 <= self.share <= 1:
            raise InvalidOption(f"a share of a document is from 0 to 1, not {self.share}")

    def leading(self, lengths: Sequence[int]) -> list[int]:
        if self.share is None:
            return [min(self.k, length) for length in lengths]
        # 0.29 * 100 is 28.999…, which must count as 29
        return [int(length * self.share + 1e-9) for length in lengths]

    def count(self, lengths: Sequence[int]) -> int:
        return sum(self.leading(lengths))

    def select(
        self, candidates: Candidates, scores: Float[Tensor, " tokens"]
    ) -> Int[Tensor, " kept"]:
        numbers = candidates.documents.cpu().numpy()
        begins = _begins(numbers, candidates.starts)
        lengths = np.diff(begins, append=len(numbers)).tolist()
        counts = np.array(self.leading(lengths), dtype=np.int64)
        behind = np.cumsum(counts)
        kept = np.arange(int(counts.sum())) + np.repeat(begins - (behind - counts), counts)
        return torch.from_numpy(kept).to(candidates.documents.device)


def _begins(numbers: IntArray, starts: Sequence[int]) -> IntArray:
    """The first candidate of each document.

    ``numbers`` are the documents of the candidates, ``starts`` the first candidate of each
    request."""
    changes = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
    return np.union1d(changes, [start for start in starts if start < len(numbers)]).astype(np.int64)

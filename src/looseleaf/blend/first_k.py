"""The first tokens of every document, as a rule but a request's first (EPIC's LegoLink-k).

They carry what a document encoded by itself gets wrong at its seam: an attention sink of its own.
Costs no evidence."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.blend.candidates import Candidates, Evidence
from looseleaf.errors import InvalidOption

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FirstK:
    """Chooses up to ``k`` tokens of each document, with ``skip_first`` none of the first document
    of a request. A ``share`` of each document's own tokens stands in for ``k``, rounded down.
    """

    k: int = 16
    skip_first: bool = True
    share: float | None = None

    def __post_init__(self) -> None:
        if self.k < 0:
            raise InvalidOption(f"first-k takes 0 or more tokens of a document, not {self.k}")
        if self.share is not None and not 0 <= self.share <= 1:
            raise InvalidOption(f"a share of a document is from 0 to 1, not {self.share}")

    @property
    def evidence(self) -> Evidence:
        return "none"

    def counts(self, lengths: Sequence[int]) -> list[int]:
        """How many tokens are chosen of each of a request's documents of these lengths: its
        first."""
        if self.share is None:
            most = [min(self.k, length) for length in lengths]
        else:
            # 0.29 * 100 is 28.999…: what is a whole number but for rounding counts as one
            most = [int(length * self.share + 1e-9) for length in lengths]
        return [0, *most[1:]] if self.skip_first and most else most

    def count(self, lengths: Sequence[int]) -> int:
        """How many tokens of a request's documents of these lengths are chosen."""
        return sum(self.counts(lengths))

    def select(
        self, candidates: Candidates, scores: Float[Tensor, " tokens"]
    ) -> Int[Tensor, " kept"]:
        numbers = candidates.documents.cpu().numpy()
        begins, firsts = _documents(numbers, candidates.starts)
        lengths = np.diff(begins, append=len(numbers)).tolist()
        # whose documents are first ones is known by their numbers
        each = FirstK(self.k, skip_first=False, share=self.share).counts(lengths)
        counts = np.array(each, dtype=np.int64)
        if self.skip_first:
            counts[numbers[begins] == numbers[firsts]] = 0
        behind = np.cumsum(counts)
        kept = np.arange(int(counts.sum())) + np.repeat(begins - (behind - counts), counts)
        return torch.from_numpy(kept).to(candidates.documents.device)


def _documents(numbers: IntArray, starts: Sequence[int]) -> tuple[IntArray, IntArray]:
    """Where the documents of candidates begin, and for each where its request does: ``numbers`` are
    those of the candidates' documents, and ``starts`` where the requests' candidates begin."""
    if not len(numbers):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    # of requests without candidates the last one that begins here is the one that has some
    requests = np.array([start for start in starts if start < len(numbers)], dtype=np.int64)
    changes = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
    begins = np.union1d(changes, requests) if len(requests) > 1 else np.append(0, changes)
    return begins, requests[np.searchsorted(requests, begins, "right") - 1]

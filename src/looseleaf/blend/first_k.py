"""The first tokens of every document, as a rule but a request's first (EPIC's LegoLink-k).

They carry what a document encoded by itself gets wrong at its seam: an attention sink of its own.
Costs no evidence."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.blend.candidates import Candidates, Evidence
from looseleaf.errors import InvalidOption


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

    def select(
        self, candidates: Candidates, scores: Float[Tensor, " tokens"]
    ) -> Int[Tensor, " kept"]:
        place = place_in_document(candidates)
        # 0.29 * 100 is 28.999…: what is a whole number but for rounding counts as one
        most = (
            torch.full_like(place, self.k)
            if self.share is None
            else (document_lengths(place) * self.share + 1e-9).long()
        )
        chosen = place < most
        if self.skip_first:
            chosen &= candidates.documents != first_documents(candidates)
        return chosen.nonzero()[:, 0]


def place_in_document(candidates: Candidates) -> Int[Tensor, " tokens"]:
    """How many candidates of its own document stand before each."""
    documents, requests = candidates.documents, candidates.requests
    index = torch.arange(len(candidates), device=documents.device)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[1:] = (documents[1:] != documents[:-1]) | (requests[1:] != requests[:-1])
    return index - torch.where(begins, index, 0).cummax(0).values


def document_lengths(place: Int[Tensor, " tokens"]) -> Int[Tensor, " tokens"]:
    """How many candidates each candidate's document has, from their places in it."""
    document = (place == 0).cumsum(0) - 1
    return document.bincount()[document] if len(place) else place


def first_documents(candidates: Candidates) -> Int[Tensor, " tokens"]:
    """The number of the first document of each candidate's request."""
    if not len(candidates):
        return candidates.documents
    starts = torch.tensor(candidates.starts, device=candidates.documents.device)
    # a request without candidates begins where the next does; nobody asks for its first document
    firsts = candidates.documents[starts.clamp_max(len(candidates) - 1)]
    return firsts[candidates.requests]

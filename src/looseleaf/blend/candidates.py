"""The tokens that may be computed again, of every request of a batch, and the selector's protocol.

Nothing here looks at a score."""

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.errors import InvalidOption

Evidence = Literal["none", "deviation", "question", "links", "oracle"]
"""What a selector's scores are made of.

``none``: position is enough, the scores are not looked at. ``deviation``: ``kv_deviation`` of rows
that reached a check layer. ``question``: the attention received from the text rows alone.
``links``: that, and what the tokens found read in turn. ``oracle``: a full prefill; for evaluation
only."""


@dataclass(frozen=True)
class Candidates:
    """The document tokens of a batch of requests that a cache holds, one request after the other.

    ``positions`` are true positions in the request, ascending within a request. ``documents``
    numbers the parts of a request, texts and documents, in order; the same stored document placed
    twice has two numbers. ``lengths`` is the number of candidates of each request, known to the
    host; ``totals`` what it was before any were left out, which a budget's ratio refers to."""

    positions: Int[Tensor, " tokens"]
    documents: Int[Tensor, " tokens"]
    lengths: tuple[int, ...]
    totals: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.totals:
            object.__setattr__(self, "totals", self.lengths)
        if not len(self.positions) == len(self.documents) == sum(self.lengths):
            raise InvalidOption(
                f"{len(self.positions)} positions and {len(self.documents)} documents do not match "
                f"requests of {sum(self.lengths)} tokens: give one of each for every candidate"
            )

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def requests(self) -> Int[Tensor, " tokens"]:
        """The request of each candidate."""
        lengths = torch.tensor(self.lengths, device=self.positions.device)
        numbers = torch.arange(len(self.lengths), device=self.positions.device)
        return numbers.repeat_interleave(lengths, output_size=len(self))

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each request's candidates begin."""
        starts, total = [], 0
        for length in self.lengths:
            starts.append(total)
            total += length
        return tuple(starts)

    def among(self, kept: Int[Tensor, " kept"], counts: tuple[int, ...]) -> "Candidates":
        """The candidates ``kept`` (ascending indices), ``counts`` of them in each request."""
        return Candidates(self.positions[kept], self.documents[kept], counts, self.totals)


@runtime_checkable
class Selector(Protocol):
    """Scores to tokens. Deterministic, and no request's choice depends on its batch mates."""

    @property
    def evidence(self) -> Evidence:
        """What the scores given to ``select`` must be."""
        ...

    def select(
        self, candidates: Candidates, scores: Float[Tensor, " tokens"]
    ) -> Int[Tensor, " kept"]:
        """Indices into ``candidates``, ascending and distinct. Higher scores are chosen first."""
        ...

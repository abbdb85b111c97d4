"""The candidate tokens of a batch."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from looseleaf.errors import InvalidOption


@dataclass(frozen=True)
class Candidates:
    """The cached document tokens of a batch, request after request.

    ``positions`` are positions in the request, ascending within a request. ``documents`` are the
    numbers of their prompt parts; a document at two positions has two numbers. ``lengths`` is the
    number of candidates of each request, known to the host. ``totals`` is that number before
    filtering, to which a budget's ratio refers."""

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
        """The index of each request's first candidate."""
        starts, total = [], 0
        for length in self.lengths:
            starts.append(total)
            total += length
        return tuple(starts)

    def among(self, kept: Int[Tensor, " kept"], counts: tuple[int, ...]) -> "Candidates":
        """The candidates ``kept`` (ascending indices), ``counts`` of them in each request."""
        return Candidates(self.positions[kept], self.documents[kept], counts, self.totals)

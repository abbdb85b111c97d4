"""The base of selectors: the evidence that a selector declares, and the hooks of token scoring."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.blend.budget import Budget, choose
from looseleaf.blend.candidates import Candidates

Evidence = Literal["none", "deviation", "question", "links", "oracle"]
"""The source of a selector's scores.

``none``: no scores, the choice depends on positions. ``deviation``: `kv_deviation` of rows at the
check layers. ``question``: attention received from text rows. ``links``: the same, and attention
received from scouts. ``oracle``: a full prefill, for evaluation only."""


@dataclass(frozen=True)
class Chase:
    """The state of a search along links.

    ``importance`` is the attention that a token received, multiplied along its chain, 0 to 1.
    ``rank`` is 0 for tokens outside of chains and higher for earlier rounds. ``scouts`` are the
    tokens of the next pass, ``found_counts`` the tokens in chains of each request."""

    importance: Float[Tensor, " tokens"]
    rank: Int[Tensor, " tokens"]
    scouts: Int[Tensor, " scouts"]
    found_counts: tuple[int, ...]
    round: int

    @property
    def scores(self) -> Float[Tensor, " tokens"]:
        """Scores for ``select``: chains first, by round, then attention."""
        return self.rank + self.importance


class Selector:
    """Chooses tokens by scores: deterministic, and independent of other requests in the batch.

    ``evidence`` is the source of the scores of ``select``. ``check_layers`` are the layers at which
    "deviation" drops rows. ``watched_share`` is the share of the last layers whose attention counts
    for "question" and "links". ``rounds`` is the number of scout passes."""

    evidence: ClassVar[Evidence] = "none"
    rounds: ClassVar[int] = 0
    budget: Budget
    check_layers: tuple[int, ...] = ()
    watched_share: float = 1.0

    @property
    def computes_candidates(self) -> bool:
        """Whether token scoring computes all candidates."""
        return self.evidence in ("deviation", "oracle")

    def count(self, lengths: Sequence[int]) -> int:
        """The most tokens chosen, or computed by token scoring, for documents of these lengths."""
        total = sum(lengths)
        return total if self.computes_candidates else self.budget.count(total)

    def leading(self, lengths: Sequence[int]) -> list[int] | None:
        """The number of chosen tokens of each document, if they are its first; None otherwise."""
        return None

    def select(
        self, candidates: Candidates, scores: Float[Tensor, " tokens"]
    ) -> Int[Tensor, " kept"]:
        """Indices into ``candidates``, ascending and distinct. Higher scores are chosen first."""
        return choose(scores, candidates, self.budget)

    def at(self, layer: int) -> "Selector":
        """The selector of check layer ``layer``, with the budget of that layer."""
        return self

    def watches(self, layer: int, num_layers: int) -> bool:
        """Whether attention at ``layer`` counts. The last layer always counts."""
        return layer >= min(num_layers - 1, round(num_layers * (1 - self.watched_share)))

    def scout_layers(self, num_layers: int) -> int:
        """The number of first layers that scouts pass."""
        return num_layers

    def begin(self, candidates: Candidates, question_scores: Float[Tensor, " tokens"]) -> Chase:
        """The search with its seed; without scouts the search is complete."""
        none = torch.zeros(0, dtype=torch.long, device=question_scores.device)
        rank = torch.zeros_like(question_scores, dtype=torch.long)
        return Chase(question_scores.float(), rank, none, (0,) * len(candidates.lengths), 0)

    def follow(
        self, candidates: Candidates, chase: Chase, strength: Float[Tensor, " tokens"]
    ) -> Chase:
        """The search after one more round.

        ``strength`` is the attention received from scouts, weighted by their importance."""
        raise NotImplementedError

"""Links: the choice follows references backwards, from the question through other documents.

A token that was encoded without the documents before it lacks its attention to them. The tokens
that the question reads most (the *seed*) are computed as *scouts*. Tokens of other documents that
scouts attend to are the next scouts, one document per round. The rest of the budget goes to all
scouts, then to tokens by the question's attention."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.blend.budget import budget_counts, choose_counts
from looseleaf.blend.candidates import Candidates
from looseleaf.blend.selectors.base import Chase, Evidence
from looseleaf.blend.selectors.question import Question
from looseleaf.errors import InvalidOption

# shares of the budget for the seed and for each round; share of the layers that scouts pass
_SEED, _STEP, _DEPTH = 0.2, 0.1, 0.5


@dataclass(frozen=True)
class Links(Question):
    """Spends ``budget`` on scouts and chosen tokens together, in ``rounds`` rounds.

    The question's attention counts in the last ``watched_share`` of the layers, as in
    ``Question``."""

    evidence: ClassVar[Evidence] = "links"
    rounds: ClassVar[int] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.budget.is_fixed:
            raise InvalidOption("links must know what they may spend: give a ratio or tokens")

    def scout_layers(self, num_layers: int) -> int:
        return max(1, round(num_layers * _DEPTH))

    def begin(self, candidates: Candidates, question_scores: Float[Tensor, " tokens"]) -> Chase:
        """The search with its seed: the tokens that the question reads most, at least one per
        request."""
        counts = self._seed_counts(candidates)
        seed = choose_counts(question_scores, candidates, counts)
        rank = torch.zeros(len(candidates), dtype=torch.long, device=seed.device)
        rank[seed] = self.rounds + 1
        return Chase(question_scores.float(), rank, seed, counts, 0)

    def follow(
        self, candidates: Candidates, chase: Chase, strength: Float[Tensor, " tokens"]
    ) -> Chase:
        """The search after one more round.

        ``strength`` is the attention received from scouts, weighted by their importance. A token
        joins a chain once. Tokens by the question's attention fill a round with too few links."""
        linked = strength.float()
        order = torch.where(linked > 0, 1 + linked, chase.importance)
        order = order.masked_fill(chase.rank > 0, -torch.inf)
        counts = self._step_counts(candidates, chase.found_counts)
        new = choose_counts(order, candidates, counts)
        importance, rank = torch.maximum(chase.importance, linked), chase.rank.clone()
        rank[new] = self.rounds - chase.round
        totals = tuple(a + b for a, b in zip(chase.found_counts, counts, strict=True))
        return Chase(importance, rank, new, totals, chase.round + 1)

    def select(
        self, candidates: Candidates, scores: Float[Tensor, " tokens"]
    ) -> Int[Tensor, " kept"]:
        """The final choice by ``Chase.scores``, with the budget that scouts have not spent."""
        return choose_counts(scores, candidates, self._rest(candidates))

    def scout_cost(self, candidates: Candidates) -> tuple[int, ...]:
        """The cost of all scouts of each request, in tokens computed through all layers."""
        total = self._seed_counts(candidates)
        for _ in range(self.rounds - 1):
            step = self._step_counts(candidates, total)
            total = tuple(a + b for a, b in zip(total, step, strict=True))
        return tuple(-int(-n * _DEPTH // 1) for n in total)

    def _seed_counts(self, candidates: Candidates) -> tuple[int, ...]:
        allowed = budget_counts(candidates, self.budget)
        return tuple(min(n, max(1, int(n * _SEED))) for n in allowed)

    def _step_counts(self, candidates: Candidates, totals: tuple[int, ...]) -> tuple[int, ...]:
        allowed = budget_counts(candidates, self.budget)
        # at least one, so that small budgets follow a link
        pairs = zip(allowed, totals, strict=True)
        return tuple(min(n - total, max(1, int(n * _STEP))) for n, total in pairs)

    def _rest(self, candidates: Candidates) -> tuple[int, ...]:
        allowed, cost = budget_counts(candidates, self.budget), self.scout_cost(candidates)
        # a budget for all tokens needs no scouts and must choose all tokens
        return tuple(
            n if n == length else max(0, n - spent)
            for n, spent, length in zip(allowed, cost, candidates.lengths, strict=True)
        )

"""Chains followed backwards: what the question reads, then what that reads in other documents.

A token encoded without the documents before it is wrong in so far as it would have read them. So
the few tokens that the question reads most (the *seed*) are computed by themselves, as *scouts*:
their attention across the border of their document names the tokens that they depend on, which are
the next scouts. A chain through as many documents as there are rounds is found. What the scouts
leave of the budget goes to all that was found, then to what the question reads next."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.blend.budget import Budget, budget_counts, choose_counts
from looseleaf.blend.candidates import Candidates, Evidence
from looseleaf.blend.selectors.question import Question
from looseleaf.errors import InvalidOption

# shares of the budget that begin a chase and that each round adds; and of the layers those, the
# first ones, that scouts pass
_SEED, _STEP, _DEPTH = 0.2, 0.1, 0.5


@dataclass(frozen=True)
class Chase:
    """What has been found so far.

    ``importance`` is the attention by which a token was found, multiplied along its chain, 0 to 1.
    ``rank`` is 0 for what was not found and higher for what was found earlier. ``scouts`` are the
    tokens to be computed next, ``found_counts`` how many were found in each request."""

    importance: Float[Tensor, " tokens"]
    rank: Int[Tensor, " tokens"]
    scouts: Int[Tensor, " scouts"]
    found_counts: tuple[int, ...]
    round: int

    @property
    def scores(self) -> Float[Tensor, " tokens"]:
        """For ``Links.select``: what was found, the earlier the better, then what is read most."""
        return self.rank + self.importance


@dataclass(frozen=True)
class Links:
    """Spends ``budget`` on scouts and on the tokens chosen, both together.

    A chase has so many ``rounds``. The question's attention is watched in the last
    ``watched_share`` of the layers, as by ``Question``."""

    budget: Budget
    watched_share: float = 0.25
    rounds: ClassVar[int] = 3

    def __post_init__(self) -> None:
        if not self.budget.is_fixed:
            raise InvalidOption("links must know what they may spend: give a ratio or tokens")

    @property
    def evidence(self) -> Evidence:
        return "links"

    @property
    def question(self) -> Question:
        """Whose scores begin the chase."""
        return Question(self.budget, self.watched_share)

    def scout_layers(self, num_layers: int) -> int:
        """Layers that scouts pass, the first ones."""
        return max(1, round(num_layers * _DEPTH))

    def begin(self, candidates: Candidates, question_scores: Float[Tensor, " tokens"]) -> Chase:
        """The seed: the tokens that the question reads most, at least one of each request."""
        counts = self._seed_counts(candidates)
        seed = choose_counts(question_scores, candidates, counts)
        rank = torch.zeros(len(candidates), dtype=torch.long, device=seed.device)
        rank[seed] = self.rounds + 1
        return Chase(question_scores.float(), rank, seed, counts, 0)

    def follow(
        self, candidates: Candidates, chase: Chase, strength: Float[Tensor, " tokens"]
    ) -> Chase:
        """One round further, by the attention received from the scouts over their layers.

        Scouts are readers that weigh as much as their importance. A token is found once; where
        there are fewer links than a round may take, what the question reads next fills it."""
        linked = strength.float()
        order = torch.where(linked > 0, 1 + linked, chase.importance)
        order = order.masked_fill(chase.rank > 0, -torch.inf)
        counts = self._step_counts(candidates, chase.found_counts)
        new = choose_counts(order, candidates, counts)
        importance, rank = torch.maximum(chase.importance, linked), chase.rank.clone()
        rank[new] = self.rounds - chase.round
        found = tuple(a + b for a, b in zip(chase.found_counts, counts, strict=True))
        return Chase(importance, rank, new, found, chase.round + 1)

    def select(
        self, candidates: Candidates, scores: Float[Tensor, " tokens"]
    ) -> Int[Tensor, " kept"]:
        """The final choice, by ``Chase.scores``, with what the scouts left of the budget."""
        return choose_counts(scores, candidates, self._left(candidates))

    def scout_cost(self, candidates: Candidates) -> tuple[int, ...]:
        """What all scouts of each request cost, in tokens computed through all layers."""
        seeds, found = self._seed_counts(candidates), self._seed_counts(candidates)
        total = seeds
        for _ in range(self.rounds - 1):
            step = self._step_counts(candidates, found)
            found = tuple(a + b for a, b in zip(found, step, strict=True))
            total = tuple(a + b for a, b in zip(total, step, strict=True))
        return tuple(-int(-n * _DEPTH // 1) for n in total)

    def _seed_counts(self, candidates: Candidates) -> tuple[int, ...]:
        allowed = budget_counts(candidates, self.budget)
        return tuple(min(n, max(1, int(n * _SEED))) for n in allowed)

    def _step_counts(self, candidates: Candidates, found: tuple[int, ...]) -> tuple[int, ...]:
        allowed = budget_counts(candidates, self.budget)
        # at least one, or small budgets would never follow a link
        pairs = zip(allowed, found, strict=True)
        return tuple(min(n - f, max(1, int(n * _STEP))) for n, f in pairs)

    def _left(self, candidates: Candidates) -> tuple[int, ...]:
        allowed, cost = budget_counts(candidates, self.budget), self.scout_cost(candidates)
        # who may compute everything needs no scouts, and must get everything
        return tuple(
            n if n == length else max(0, n - spent)
            for n, spent, length in zip(allowed, cost, candidates.lengths, strict=True)
        )

"""Tokens at random: the control that a rule must beat."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.blend.budget import Budget, choose
from looseleaf.blend.candidates import Candidates, Evidence
from looseleaf.errors import InvalidOption

# 64-bit mixing constants of the splitmix generator, as signed integers
_STRIDE, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685


@dataclass(frozen=True)
class RandomTokens:
    """Chooses tokens by a hash of their position, so that batch mates change nothing."""

    budget: Budget
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.budget.is_fixed:
            raise InvalidOption("random tokens have no scores: give a ratio or a number of tokens")

    @property
    def evidence(self) -> Evidence:
        return "none"

    def select(
        self, candidates: Candidates, scores: Float[Tensor, " tokens"]
    ) -> Int[Tensor, " kept"]:
        return choose(hash_to_unit(candidates.positions, self.seed), candidates, self.budget)


def hash_to_unit(positions: Int[Tensor, " tokens"], seed: int) -> Float[Tensor, " tokens"]:
    """A number in 0 to 1 for each position, the same for the same seed, fp32."""
    x = (positions.long() + 1) * _STRIDE + seed * 2_654_435_769
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        # the mask makes the arithmetic shift a logical one
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (x & 0xFFFFFF).to(torch.float32) / 0x1000000

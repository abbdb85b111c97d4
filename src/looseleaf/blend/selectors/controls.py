"""The controls that other selectors are compared with: all tokens, none, random ones, the oracle.

All candidates equal a full prefill. None is full reuse (Prompt Cache, TurboRAG, Block-Attention at
inference). The oracle is for evaluation only, because blending exists to avoid the full prefill."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.blend.budget import Budget, choose
from looseleaf.blend.candidates import Candidates
from looseleaf.blend.selectors.base import Evidence, Selector
from looseleaf.blend.selectors.first_k import FirstK
from looseleaf.errors import InvalidOption

# 64-bit mixing constants of the splitmix generator
_STRIDE, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Everything(FirstK):
    """Chooses every candidate."""

    share: float | None = 1.0


@dataclass(frozen=True)
class Nothing(FirstK):
    """Chooses nothing."""

    k: int = 0


@dataclass(frozen=True)
class Oracle(Selector):
    """Chooses the tokens with the highest deviation, summed over all layers of a full prefill."""

    evidence: ClassVar[Evidence] = "oracle"
    budget: Budget


@dataclass(frozen=True)
class RandomTokens(Selector):
    """Chooses tokens by a hash of their position, which is independent of the batch."""

    budget: Budget
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.budget.is_fixed:
            raise InvalidOption("random tokens have no scores: give a ratio or a number of tokens")

    def select(
        self, candidates: Candidates, scores: Float[Tensor, " tokens"]
    ) -> Int[Tensor, " kept"]:
        return choose(hash_to_unit(candidates.positions, self.seed), candidates, self.budget)


def hash_to_unit(positions: Int[Tensor, " tokens"], seed: int) -> Float[Tensor, " tokens"]:
    """A number in 0 to 1 for each position, the same for the same seed, fp32."""
    x = positions.cpu().numpy().astype(np.uint64)
    x = (x + np.uint64(1)) * np.uint64(_STRIDE) + np.uint64(seed * 2_654_435_769 & _WORD)
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    unit = (x & np.uint64(0xFFFFFF)).astype(np.float32) / np.float32(0x1000000)
    return torch.from_numpy(unit).to(positions.device)

"""KV deviation (CacheBlend, arXiv 2405.16444): the change between fresh and stored keys and values.

The pass computes all candidates up to the check layer. The tokens with the largest deviation
continue, fewer at each check layer (gradual filtering). Layer 0 never deviates, because its keys
depend only on the token and its position. The first check layer must be above the layer at which
documents first read each other."""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.blend.budget import Budget
from looseleaf.blend.selectors.base import Evidence, Selector
from looseleaf.errors import InvalidOption
from looseleaf.parallel import Ranks

# in 16 bits it is the result of each layer that is rounded, in fp32 a sum of many terms
_NOISE_STEPS = 3
_LEAST_NOISE = 2.0**-16
_TINY = 1e-12


@dataclass(frozen=True)
class Deviation(Selector):
    """Keeps the tokens with the highest deviation at each of ``check_layers``.

    ``factors`` scales the budget at each check layer; the default is 1. The request spends the mean
    over the layers from the first check layer on. The layers before it compute all candidates."""

    evidence: ClassVar[Evidence] = "deviation"
    budget: Budget
    check_layers: tuple[int, ...] = (1,)
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        layers = self.check_layers
        if not layers or list(layers) != sorted(set(layers)) or layers[0] < 1:
            raise InvalidOption(
                f"check layers are ascending and start at 1 or later (layer 0 never deviates), "
                f"not {layers}"
            )
        if self.factors and len(self.factors) != len(layers):
            raise InvalidOption(f"{len(layers)} check layers need as many factors, or none")
        if any(a < b for a, b in pairwise(self.factors)):
            raise InvalidOption("factors never rise: a row left out can't come back")

    def at(self, layer: int) -> "Deviation":
        index = self.check_layers.index(layer)
        factor = self.factors[index] if self.factors else 1.0
        return Deviation(self.budget.scaled(factor), (layer,))


def kv_deviation(
    keys: Float[Tensor, "tokens kv_heads head_dim"],
    values: Float[Tensor, "tokens kv_heads value_dim"],
    stored_keys: Float[Tensor, "tokens kv_heads head_dim"],
    stored_values: Float[Tensor, "tokens kv_heads value_dim"],
    ranks: Ranks | None = None,
) -> Float[Tensor, " tokens"]:
    """Relative change of each token's keys plus that of its values, fp32; 0 within rounding.

    With ``ranks`` each has some of the heads, and all get the change over all heads.

    Fresh and stored keys must have the same frame. The change is relative because keys are often
    longer than values; CacheBlend uses the absolute difference."""
    norms = [*_norms(keys, stored_keys), *_norms(values, stored_values)]
    if ranks is not None:
        norms = [*ranks.sum(torch.stack(norms).square()).sqrt()]
    of_keys, keys_norm, of_values, values_norm = norms
    change = of_keys / keys_norm.clamp_min(_TINY) + of_values / values_norm.clamp_min(_TINY)
    # rounding depends on step sizes, and the choice must not
    return change.masked_fill(change < _noise(values.dtype), 0.0)


def _noise(dtype: torch.dtype) -> float:
    """The `kv_deviation` of the same keys and values, computed twice in ``dtype``."""
    return max(_NOISE_STEPS * torch.finfo(dtype).eps, _LEAST_NOISE)


def _norms(
    fresh: Float[Tensor, "tokens kv_heads head_dim"],
    stored: Float[Tensor, "tokens kv_heads head_dim"],
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """The norm of each token's change, and that of its stored vector."""
    fresh, stored = fresh.float().flatten(1), stored.float().flatten(1)
    norm = torch.linalg.vector_norm
    return norm(fresh - stored, dim=1), norm(stored, dim=1)

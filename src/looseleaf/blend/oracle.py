"""What a full prefill knows: how far each stored token is from the truth, over all layers.

For evaluation only, since it needs the full prefill that blending is there to avoid."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.blend.budget import Budget, choose
from looseleaf.blend.candidates import Candidates, Evidence
from looseleaf.blend.deviation import kv_deviation

Vectors = Float[Tensor, "tokens kv_heads head_dim"]


@dataclass(frozen=True)
class Oracle:
    """Chooses the tokens with the highest true deviation."""

    budget: Budget

    @property
    def evidence(self) -> Evidence:
        return "oracle"

    def select(
        self, candidates: Candidates, scores: Float[Tensor, " tokens"]
    ) -> Int[Tensor, " kept"]:
        return choose(scores, candidates, self.budget)


def deviation_over_layers(
    layers: Iterable[tuple[Vectors, Vectors, Vectors, Vectors]],
) -> Float[Tensor, " tokens"]:
    """The sum of ``kv_deviation`` over the layers: true keys and values, then the stored ones."""
    return torch.stack([kv_deviation(*tensors) for tensors in layers]).sum(0)

"""Affine maps of a linear layer's state: a document's whole effect on it, at any position."""

from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor

State = Float[Tensor, "heads rows columns"]


@dataclass(frozen=True)
class AffineMap:
    """S ↦ A·S + B, for states S [heads, rows, columns].

    ``transition`` A is [heads, rows, rows] in a layer with a delta rule. It is [heads] in a Mamba-2
    layer, whose tokens scale the whole state. ``offset`` B has the shape of S."""

    transition: Float[Tensor, "heads *square"]
    offset: State

    def apply(self, state: State) -> State:
        """The state after the document, from the state before it."""
        return _product(self.transition, state) + self.offset

    def then(self, later: "AffineMap") -> "AffineMap":
        """The map of this document followed by ``later``."""
        return AffineMap(_product(later.transition, self.transition), later.apply(self.offset))

    def rounded(self, dtype: torch.dtype) -> "AffineMap":
        """The map as stored in ``dtype``, in the own dtype again."""
        return AffineMap(
            *(part.to(dtype).to(part.dtype) for part in (self.transition, self.offset))
        )

    def norms(self) -> Float[Tensor, " heads"]:
        """The largest singular value of A in each head; never above 1 in these layers."""
        if self.transition.ndim == 1:
            return self.transition.abs()
        norm: Tensor = torch.linalg.matrix_norm(self.transition, 2)
        return norm


def chain(maps: list[AffineMap]) -> AffineMap:
    """The map of at least one document after another."""
    return reduce(AffineMap.then, maps)


def _product(transition: Tensor, operand: Tensor) -> Tensor:
    if transition.ndim == 1:
        return transition.reshape(-1, *[1] * (operand.ndim - 1)) * operand
    return transition @ operand

"""A linear layer's inputs, before and after its short convolution, and the protocol of a family."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from looseleaf_lab.bench.hybrids.affine import AffineMap, State


@dataclass(frozen=True)
class Projection:
    """Rows of tokens before the convolution: its ``channels``, and gates that bypass it."""

    channels: Float[Tensor, "tokens channels"]
    gates: Float[Tensor, "tokens gates"]

    def __getitem__(self, tokens: slice) -> "Projection":
        return Projection(self.channels[tokens], self.gates[tokens])


@runtime_checkable
class Steps(Protocol):
    """Tokens of one layer after the convolution: all that the recurrence reads."""

    def affine_map(self) -> AffineMap:
        """The map of all tokens, computed by matrix products over chunks."""
        ...

    def recurrence(self, state: State) -> State:
        """The state after all tokens, computed token by token."""
        ...

    def __getitem__(self, tokens: slice) -> "Steps":
        """Some of the tokens."""
        ...


@runtime_checkable
class LinearLayer(Protocol):
    """Reads one layer of a Transformers model by its equations."""

    @property
    def module(self) -> Any:
        """Transformers' module."""
        ...

    @property
    def kernel_size(self) -> int:
        """Tokens that one output of the convolution reads."""
        ...

    def project(self, hidden: Float[Tensor, "tokens hidden"]) -> Projection:
        """The layer's input projections."""
        ...

    def steps(self, projection: Projection, context: Float[Tensor, "previous channels"]) -> Steps:
        """The tokens after the convolution, which reads ``context`` before them."""
        ...

    def empty_state(self) -> State:
        """The state before the first token."""
        ...


def convolve(module: Any, projection: Projection, context: Tensor) -> Tensor:
    """SiLU of the causal depthwise convolution over ``context`` and the tokens' channels.

    Returns [tokens, channels]; ``context`` has kernel size − 1 rows."""
    rows = torch.cat([context, projection.channels]).T[None]
    mixed = functional.conv1d(rows, module.conv1d.weight, module.conv1d.bias, groups=rows.shape[1])
    return functional.silu(mixed[0].T)


def tail_of(context: Tensor, channels: Tensor) -> Tensor:
    """The last rows, as many as ``context`` has: the context of the tokens that follow."""
    return torch.cat([context, channels])[-len(context) :] if len(context) else context

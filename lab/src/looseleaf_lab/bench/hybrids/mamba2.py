"""Mamba-2 (arXiv 2405.21060), as Granite 4 H and Bamba use it.

A token with input x, step size δ, input gate b and rate a updates the state S [head dim, state dim]
to exp(δ a) S + δ x bᵀ. The factor is one number per head, so composing maps costs no product."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from looseleaf_lab.bench.hybrids.affine import AffineMap, State
from looseleaf_lab.bench.hybrids.layer import Projection, convolve


@dataclass(frozen=True)
class MambaSteps:
    """Inputs times step sizes, input gates, and logarithms of the factors."""

    scaled_input: Float[Tensor, "heads tokens head_dim"]
    gate: Float[Tensor, "heads tokens state_dim"]
    log_decay: Float[Tensor, "heads tokens"]

    def __getitem__(self, tokens: slice) -> "MambaSteps":
        return MambaSteps(
            *(part[:, tokens] for part in (self.scaled_input, self.gate, self.log_decay))
        )

    def affine_map(self) -> AffineMap:
        """The map of all tokens, by one product."""
        total = self.log_decay.sum(1)
        remaining = total[:, None] - self.log_decay.cumsum(1)
        decayed = remaining.exp()[..., None] * self.scaled_input
        return AffineMap(total.exp(), decayed.mT @ self.gate)

    def recurrence(self, state: State) -> State:
        """The state after all tokens, by the update of each."""
        for token in range(self.gate.shape[1]):
            added = self.scaled_input[:, token, :, None] * self.gate[:, token, None, :]
            state = state * self.log_decay[:, token].exp()[:, None, None] + added
        return state


@dataclass(frozen=True)
class MambaLayer:
    """A ``GraniteMoeHybridMambaLayer`` or ``BambaMixer`` of Transformers."""

    module: Any

    @property
    def kernel_size(self) -> int:
        return int(self.module.conv_kernel_size)

    def project(self, hidden: Float[Tensor, "tokens hidden"]) -> Projection:
        """Inputs and both gates before the convolution; step sizes as gates."""
        module = self.module
        sizes = [module.intermediate_size, module.conv_dim, module.num_heads]
        _, channels, steps = module.in_proj(hidden).split(sizes, 1)
        return Projection(channels, steps)

    def steps(
        self, projection: Projection, context: Float[Tensor, "previous channels"]
    ) -> MambaSteps:
        """Inputs, gates and factors by head."""
        module = self.module
        width = module.n_groups * module.ssm_state_size
        sizes = [module.intermediate_size, width, width]
        inputs, gates, _ = convolve(module, projection, context).split(sizes, 1)
        step = functional.softplus(projection.gates.T + module.dt_bias[:, None])
        step = step.clamp(*module.time_step_limit)
        gates = gates.unflatten(1, (module.n_groups, -1))
        gates = gates.repeat_interleave(module.num_heads // module.n_groups, 1)
        inputs = inputs.unflatten(1, (module.num_heads, -1)).transpose(0, 1)
        return MambaSteps(
            scaled_input=inputs * step[..., None],
            gate=gates.transpose(0, 1),
            log_decay=-module.A_log.exp()[:, None] * step,
        )

    def empty_state(self) -> State:
        """Zeros [heads, head dim, state dim]."""
        module = self.module
        shape = module.num_heads, module.head_dim, module.ssm_state_size
        return torch.zeros(shape, dtype=module.A_log.dtype)

"""Gated DeltaNet (arXiv 2412.06464), as Qwen3-Next and Qwen3.5 use it.

A token with key k, value v, gate γ and write strength β updates the state S [key dim, value dim] to
γ (I − β k kᵀ) S + β k vᵀ. Each update is affine in S, so a document is, too. A chunk's map follows
from one triangular system (WY form): A = γ I − K̃ᵀ W, B = K̃ᵀ U."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from looseleaf_lab.bench.hybrids.affine import AffineMap, State, chain
from looseleaf_lab.bench.hybrids.layer import Projection, convolve

_CHUNK = 64
_NORM_EPS = 1e-6


@dataclass(frozen=True)
class DeltaSteps:
    """Keys of length 1, values, logarithms of γ, and β."""

    key: Float[Tensor, "heads tokens key_dim"]
    value: Float[Tensor, "heads tokens value_dim"]
    log_decay: Float[Tensor, "heads tokens"]
    beta: Float[Tensor, "heads tokens"]

    def __getitem__(self, tokens: slice) -> "DeltaSteps":
        return DeltaSteps(
            *(part[:, tokens] for part in (self.key, self.value, self.log_decay, self.beta))
        )

    def affine_map(self) -> AffineMap:
        """The map of all tokens, chunk by chunk."""
        heads, tokens, key_dim = self.key.shape
        identity = torch.eye(key_dim, dtype=self.key.dtype).expand(heads, -1, -1)
        nothing = AffineMap(identity, self.key.new_zeros(heads, key_dim, self.value.shape[2]))
        starts = range(0, tokens, _CHUNK)
        return chain([nothing, *(self[start : start + _CHUNK]._chunk_map() for start in starts)])

    def _chunk_map(self) -> AffineMap:
        log_decay = self.log_decay.cumsum(1)
        beta = self.beta[..., None]
        # row t, column s: the decay from s to t; the upper part is masked before it overflows
        pairs = log_decay[:, :, None] - log_decay[:, None, :]
        pairs = pairs.masked_fill(torch.ones_like(pairs, dtype=torch.bool).triu(1), -torch.inf)
        system = beta * (self.key @ self.key.mT) * pairs.exp()
        read = beta * log_decay.exp()[..., None] * self.key
        updates, reads = (
            torch.linalg.solve_triangular(system, side, upper=False, unitriangular=True)
            for side in (beta * self.value, read)
        )
        written = ((log_decay[:, -1:] - log_decay).exp()[..., None] * self.key).mT
        decay = log_decay[:, -1].exp()[:, None, None]
        identity = torch.eye(self.key.shape[2], dtype=self.key.dtype)
        return AffineMap(decay * identity - written @ reads, written @ updates)

    def recurrence(self, state: State) -> State:
        """The state after all tokens, by the update of each."""
        for token in range(self.key.shape[1]):
            key, value = self.key[:, token, :, None], self.value[:, token, None, :]
            state = state * self.log_decay[:, token].exp()[:, None, None]
            error = value - key.mT @ state
            state = state + key @ (self.beta[:, token, None, None] * error)
        return state


@dataclass(frozen=True)
class DeltaNetLayer:
    """A ``Qwen3NextGatedDeltaNet`` or ``Qwen3_5GatedDeltaNet`` of Transformers."""

    module: Any

    @property
    def kernel_size(self) -> int:
        return int(self.module.conv_kernel_size)

    def project(self, hidden: Float[Tensor, "tokens hidden"]) -> Projection:
        """Queries, keys and values before the convolution; b and a as gates."""
        module = self.module
        if hasattr(module, "in_proj_qkvz"):
            mixed = module.in_proj_qkvz(hidden)[None], module.in_proj_ba(hidden)[None]
            query, key, value, _, b, a = module.fix_query_key_value_ordering(*mixed)
            channels = torch.cat([part[0].flatten(1) for part in (query, key, value)], 1)
            return Projection(channels, torch.cat([b[0], a[0]], 1))
        gates = torch.cat([module.in_proj_b(hidden), module.in_proj_a(hidden)], 1)
        return Projection(module.in_proj_qkv(hidden), gates)

    def steps(
        self, projection: Projection, context: Float[Tensor, "previous channels"]
    ) -> DeltaSteps:
        """Keys, values and gates by value head."""
        module = self.module
        sizes = [module.key_dim, module.key_dim, module.value_dim]
        _, keys, values = convolve(module, projection, context).split(sizes, 1)
        keys = keys.unflatten(1, (module.num_k_heads, -1))
        keys = keys * torch.rsqrt(keys.square().sum(2, keepdim=True) + _NORM_EPS)
        keys = keys.repeat_interleave(module.num_v_heads // module.num_k_heads, 1)
        b, a = projection.gates.T.chunk(2)
        rate = -module.A_log.exp()[:, None]
        return DeltaSteps(
            key=keys.transpose(0, 1),
            value=values.unflatten(1, (module.num_v_heads, -1)).transpose(0, 1),
            log_decay=rate * functional.softplus(a + module.dt_bias[:, None]),
            beta=b.sigmoid(),
        )

    def empty_state(self) -> State:
        """Zeros [value heads, key dim, value dim]."""
        module = self.module
        shape = module.num_v_heads, module.head_k_dim, module.head_v_dim
        return torch.zeros(shape, dtype=module.A_log.dtype)

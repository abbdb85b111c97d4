"""Keys and queries as attention has them: queries far from keys, some keys read together."""

from dataclasses import dataclass

import torch
from torch import Tensor


def layer(
    num_keys: int, num_queries: int, head_dim: int = 32, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Keys around topics and queries that ask for them, shifted away from all keys."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    latent = head_dim // 2
    topics = normal(max(2, num_keys // 64), latent)
    turn = torch.linalg.qr(normal(head_dim, head_dim))[0]

    def around(count: int) -> Tensor:
        topic = torch.randint(len(topics), (count,), generator=generator)
        return (topics[topic] + 0.5 * normal(count, latent)) @ turn[:latent]

    keys = around(num_keys) + 0.3 * normal(num_keys, head_dim) + 4 * turn[-1]
    queries = around(num_queries) + 0.3 * normal(num_queries, head_dim)
    return keys, queries + 6 * turn[-2] - 3 * turn[-1]


@dataclass
class Made:
    """A segment of random layers; ``calls`` counts how often keys were asked for."""

    tokens: int
    heads: tuple[int, int, int] = (2, 4, 2)
    head_dim: int = 16
    calls: int = 0

    def keys(self, layer_: int, kv_head: int) -> Tensor:
        self.calls += 1
        return layer(self.tokens, 1, self.head_dim, seed=100 * layer_ + kv_head)[0]

    def queries(self, layer_: int, qo_head: int) -> Tensor:
        return layer(1, self.tokens, self.head_dim, seed=100 * layer_ + qo_head // 2)[1]

"""Attention as plainly as it can be written: all keys so far, rotated at their true positions."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from looseleaf.config import ModelConfig
from looseleaf.models import Decoder
from looseleaf.rope import layer_rotations, softmax_scale


def sinks_of(decoder: Decoder) -> list[Tensor | None]:
    """The sinks of every layer."""
    return [layer.sinks for layer in decoder.weights.layers]


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The weights of the keys of ``scores`` ``[heads, rows, keys]`` beside a key for the sink."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def scaled(q: Tensor, positions: Tensor, config: ModelConfig) -> Tensor:
    """Queries ``[rows, heads, head_dim]`` times their factors by position."""
    if config.query_scaling is None:
        return q
    beta, period = config.query_scaling.beta, config.query_scaling.period
    factors = [1 + beta * math.log(1 + int(p) // period) for p in positions]
    return q * torch.tensor(factors, dtype=q.dtype)[:, None, None]


class DenseAttend:
    """One sequence's attention, at least in fp32. ``positions`` are those of the next call's rows,
    ``asked`` those of them that the last layer has queries of, None for all."""

    def __init__(
        self,
        config: ModelConfig,
        num_positions: int = 128,
        sinks: Sequence[Tensor | None] | None = None,
    ) -> None:
        self.config = config
        self.sinks = sinks or [None] * config.num_layers
        self.rotations = layer_rotations(config, num_positions)
        self.keys: list[list[Tensor]] = [[] for _ in range(config.num_layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(config.num_layers)]
        self.positions = torch.empty(0, dtype=torch.long)
        self.asked: Tensor | None = None
        self.key_positions: list[list[Tensor]] = [[] for _ in range(config.num_layers)]

    def __call__(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        dtype = q.dtype
        wide, stored = torch.promote_types(dtype, torch.float32), self.config.kv_layer(layer)
        q = q.to(wide)
        if k is not None and v is not None:
            self.keys[layer].append(self.turn(layer, k.to(wide), self.positions))
            self.values[layer].append(v.to(wide))
            self.key_positions[layer].append(self.positions)
        group = self.config.num_qo_heads // self.config.num_kv_heads
        keys = torch.cat(self.keys[stored]).repeat_interleave(group, 1)
        values = torch.cat(self.values[stored]).repeat_interleave(group, 1)
        rows = self.positions
        if self.asked is not None and layer == self.config.num_layers - 1:
            rows = rows[self.asked]
        distance = rows[:, None] - torch.cat(self.key_positions[stored])[None]
        window = self.config.window(layer)
        hidden = (distance < 0) | (distance >= window if window else distance < 0)
        q = scaled(q, rows, self.config)
        scores = torch.einsum("qhd,khd->hqk", self.turn(layer, q, rows), keys)
        scores = scores * softmax_scale(self.config, layer)
        if cap := self.config.soft_cap:
            scores = cap * torch.tanh(scores / cap)
        weights = softmax(scores.masked_fill(hidden, -torch.inf), self.sinks[layer])
        return torch.einsum("hqk,khd->qhd", weights, values).to(dtype)

    def turn(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        rotation = self.rotations[layer]
        width, interleaved = rotation.rotary_dim, rotation.interleaved
        cos, sin = (table[positions][:, None] for table in (rotation.cos, rotation.sin))
        turning, rest = x[..., :width], x[..., width:]
        if interleaved:
            first, second = turning[..., 0::2], turning[..., 1::2]
        else:
            first, second = turning.chunk(2, -1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        joined = torch.stack(turned, -1) if interleaved else torch.stack(turned, -2)
        return torch.cat((joined.flatten(-2), rest), -1)

"""Rotation tables, softmax scales and fingerprints of RoPE configurations.

A frame is an offset: the score of a query at ``p`` and a key at ``offset + j`` equals that of a
query at ``p - offset`` and a key at ``j``. One table of positions from 0 therefore serves every
frame.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.config import ModelConfig, QueryScaling, RopeConfig
from looseleaf.errors import InvalidOption
from looseleaf.rope.laws import frozen_length, is_extended, original_length, rope_frequencies
from looseleaf.types import Rotation

T = TypeVar("T")
R = TypeVar("R")
# positions per iteration: angles in fp64 take four times the memory of a table
_POSITIONS = 1 << 14


def build_rotation(
    config: RopeConfig, num_positions: int, device: torch.device | str = "cpu"
) -> Rotation:
    """Unscaled cosines and sines of positions ``0 .. num_positions - 1``, fp32 from fp64 angles.

    Raises InvalidOption for fewer than one position."""
    if num_positions < 1:
        raise InvalidOption(f"a rotation table needs at least one position, not {num_positions}")
    inverse = rope_frequencies(config).inverse
    cos, sin = (
        torch.empty(num_positions, len(inverse), dtype=torch.float32, device=device)
        for _ in range(2)
    )
    for start in range(0, num_positions, _POSITIONS):
        stop = min(start + _POSITIONS, num_positions)
        angles = torch.arange(start, stop, dtype=torch.float64)[:, None] * inverse
        cos[start:stop] = angles.cos()
        sin[start:stop] = angles.sin()
    return Rotation(cos=cos, sin=sin, interleaved=config.interleaved)


def layer_rotations(
    config: ModelConfig, num_positions: int, device: torch.device | str = "cpu"
) -> tuple[Rotation, ...]:
    """The table of every layer; layers with equal laws share one object."""
    tables = {rope: build_rotation(rope, num_positions, device) for rope in config.ropes}
    return tuple(tables[config.rope_of(layer)] for layer in range(config.num_layers))


def map_distinct(items: Sequence[T], function: Callable[[T], R]) -> list[R]:
    """``function`` of every item, called once per distinct object."""
    results: dict[int, R] = {}
    for item in items:
        if id(item) not in results:
            results[id(item)] = function(item)
    return [results[id(item)] for item in items]


def softmax_scale(config: ModelConfig, layer: int) -> float:
    """The factor of an unscaled ``q . k``, with the law's attention factor of both q and k."""
    factor = rope_frequencies(config.rope_of(layer)).attention_factor
    scale = config.softmax_scale
    return float((config.head_dim**-0.5 if scale is None else scale) * factor**2)


def query_scale(config: RopeConfig) -> Float[Tensor, " head_dim"] | None:
    """Factors of an unrotated query's dims, fp32; None if all are 1.

    `softmax_scale` applies the attention factor to all dims, but laws define it for rotated dims
    only. With partial rotary embeddings (YaRN, LongRoPE) the factors of the other dims undo it.
    """
    factor = rope_frequencies(config).attention_factor
    if factor == 1.0 or config.rotary_dim == config.head_dim:
        return None
    scale = torch.ones(config.head_dim)
    scale[config.rotary_dim :] = factor**-2
    return scale


def position_scales(
    scaling: QueryScaling, positions: Int[Tensor, " rows"]
) -> Float[Tensor, " rows"]:
    """The factors of queries at ``positions``, fp32."""
    periods = torch.div(positions, scaling.period, rounding_mode="floor")
    return torch.log1p(periods.float()).mul_(scaling.beta).add_(1.0)


def rope_fingerprint(config: RopeConfig) -> bytes:
    """A digest of everything that changes a stored key; equal on every machine.

    It depends on the frozen length only where this changes frequencies: LongRoPE has two regimes,
    dynamic NTK one for each length beyond the original. It depends on the attention factor, because
    keys after the first layer do.
    """
    always = (config.head_dim, config.rotary_dim, config.interleaved, config.theta, config.law)
    extended = is_extended(config)
    by_law: dict[str, tuple[object, ...]] = {
        "none": (),
        "default": (),
        "linear": (config.factor,),
        "dynamic": (config.factor, config.max_position_embeddings, frozen_length(config))
        if extended
        else (),
        "llama3": (
            config.factor,
            config.low_freq_factor,
            config.high_freq_factor,
            original_length(config),
        ),
        "yarn": (
            (config.factor, config.beta_fast, config.beta_slow),
            (config.truncate, original_length(config), rope_frequencies(config).attention_factor),
        ),
        "longrope": (
            config.long_factor if extended else config.short_factor,
            rope_frequencies(config).attention_factor,
        ),
        "proportional": (config.factor, config.partial_rotary_factor),
    }
    packed = (config.own_dim,) if config.own_dim else ()
    values = (always, by_law[config.law], *packed)
    return hashlib.blake2b(repr(values).encode(), digest_size=16).digest()


def model_rope_fingerprint(config: ModelConfig) -> bytes:
    """The `rope_fingerprint` of a model's law, or the digest over all layers if laws differ."""
    if len(config.ropes) == 1:
        return rope_fingerprint(config.ropes[0])
    digest = hashlib.blake2b(digest_size=16)
    for layer in range(config.num_layers):
        digest.update(rope_fingerprint(config.rope_of(layer)))
    return digest.digest()

"""The table that turns queries and keys, the softmax scale, the name of what changes a key.

A frame is an offset: the score of a query at ``p`` and a key at ``offset + j`` is that of a query
at ``p - offset`` and a key at ``j``. So one table of positions counted from 0 serves every frame.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.config import ModelConfig, RopeConfig
from looseleaf.errors import InvalidOption
from looseleaf.rope.laws import frozen_length, is_extended, original_length, rope_frequencies
from looseleaf.types import Rotation

Shared = TypeVar("Shared")
Made = TypeVar("Made")
# of which angles are in memory at a time
_POSITIONS = 1 << 14


def build_rotation(
    config: RopeConfig, num_positions: int, device: torch.device | str = "cpu"
) -> Rotation:
    """Unscaled cosines and sines of positions ``0 .. num_positions - 1``, fp32 from fp64 angles."""
    if num_positions < 1:
        raise InvalidOption(f"a rotation table needs at least one position, not {num_positions}")
    inverse = rope_frequencies(config).inverse
    cos, sin = (
        torch.empty(num_positions, len(inverse), dtype=torch.float32, device=device)
        for _ in range(2)
    )
    # angles and their cosines in fp64 take four times a table: of a million at once, gigabytes
    for start in range(0, num_positions, _POSITIONS):
        stop = min(start + _POSITIONS, num_positions)
        angles = torch.arange(start, stop, dtype=torch.float64)[:, None] * inverse
        cos[start:stop] = angles.cos()
        sin[start:stop] = angles.sin()
    return Rotation(cos=cos, sin=sin, interleaved=config.interleaved)


def layer_rotations(
    config: ModelConfig, num_positions: int, device: torch.device | str = "cpu"
) -> tuple[Rotation, ...]:
    """The table of every layer: the same object for layers of one law."""
    made = {rope: build_rotation(rope, num_positions, device) for rope in config.ropes}
    return tuple(made[config.rope_of(layer)] for layer in range(config.num_layers))


def made_once(each: Sequence[Shared], make: Callable[[Shared], Made]) -> list[Made]:
    """What ``make`` has of every layer's table, made once for layers that share one object."""
    made: dict[int, Made] = {}
    for one in each:
        if id(one) not in made:
            made[id(one)] = make(one)
    return [made[id(one)] for one in each]


def softmax_scale(config: ModelConfig, layer: int) -> float:
    """What a plain ``q . k`` is multiplied with: the law's factor comes with q and with k."""
    factor = rope_frequencies(config.rope_of(layer)).attention_factor
    own = config.softmax_scale
    return float((config.head_dim**-0.5 if own is None else own) * factor**2)


def query_scale(config: RopeConfig) -> Float[Tensor, " head_dim"] | None:
    """What each dim of a query is multiplied with before it turns, fp32; None for all ones.

    The factor in ``softmax_scale`` reaches every dim, but the law means it for those that turn.
    Where some pass through (partial rotary with YaRN or LongRoPE), their share of the score is
    divided by it again.
    """
    factor = rope_frequencies(config).attention_factor
    if factor == 1.0 or config.rotary_dim == config.head_dim:
        return None
    scale = torch.ones(config.head_dim)
    scale[config.rotary_dim :] = factor**-2
    return scale


def rope_fingerprint(config: RopeConfig) -> bytes:
    """A digest of everything that changes a stored key; equal on every machine, for every process.

    The frozen length counts exactly where it changes frequencies: LongRoPE has two regimes, dynamic
    NTK one for each length past the original. The attention factor counts too: the hidden states
    behind the first layer, and so their keys, depend on it.
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
    }
    return hashlib.blake2b(repr((always, by_law[config.law])).encode(), digest_size=16).digest()


def model_rope_fingerprint(config: ModelConfig) -> bytes:
    """The same of a whole model: of its law, or of those of all layers where they differ."""
    if len(config.ropes) == 1:
        return rope_fingerprint(config.ropes[0])
    digest = hashlib.blake2b(digest_size=16)
    for layer in range(config.num_layers):
        digest.update(rope_fingerprint(config.rope_of(layer)))
    return digest.digest()

"""The scaling laws of RoPE: one inverse frequency per pair of dims, in fp64.

Laws that depend on the sequence length (``dynamic``, ``longrope``) are evaluated once, at the
configuration's frozen length. Stored keys can only be read under the frequencies they were stored
with.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.config import RopeConfig
from looseleaf.errors import InvalidOption, UnsupportedModel


class Frequencies(NamedTuple):
    """Radians per position of each pair, fp64, and the factor of q and of k."""

    inverse: Float[Tensor, " half_rotary_dim"]
    attention_factor: float


def rope_frequencies(config: RopeConfig) -> Frequencies:
    """The frequencies of ``config`` at its frozen length.

    Raises UnsupportedModel for an unknown law, InvalidOption for inconsistent parameters."""
    law = _LAWS.get(config.law)
    if law is None:
        known = ", ".join(_LAWS)
        raise UnsupportedModel(
            f"RoPE law {config.law!r} is not implemented; Looseleaf supports {known}"
        )
    if not config.own_dim:
        return law(config)
    own = law(replace(config, head_dim=config.own_dim, rotary_dim=config.own_dim))
    # unused pairs at the end have zeros in keys
    repeated = own.inverse.repeat(-(-config.rotary_dim // config.own_dim))
    return own._replace(inverse=repeated[: config.rotary_dim // 2])


def frozen_length(config: RopeConfig) -> int:
    """The sequence length at which length-dependent laws are evaluated."""
    return config.length if config.length is not None else config.max_position_embeddings


def original_length(config: RopeConfig) -> int:
    """The model's training length before its context was extended."""
    if config.original_max_position_embeddings is not None:
        return config.original_max_position_embeddings
    return config.max_position_embeddings


def is_extended(config: RopeConfig) -> bool:
    """Whether the frozen length exceeds the law's original range."""
    if config.law == "dynamic":
        return frozen_length(config) > config.max_position_embeddings
    return frozen_length(config) > original_length(config)


def _periods(config: RopeConfig, theta: float) -> Float[Tensor, " half_rotary_dim"]:
    pairs = torch.arange(0, config.rotary_dim, 2, dtype=torch.float64)
    return theta ** (pairs / config.rotary_dim)


def _none(config: RopeConfig) -> Frequencies:
    return Frequencies(torch.zeros(config.rotary_dim // 2, dtype=torch.float64), 1.0)


def _default(config: RopeConfig) -> Frequencies:
    return Frequencies(1.0 / _periods(config, config.theta), 1.0)


def _linear(config: RopeConfig) -> Frequencies:
    return Frequencies(1.0 / (config.factor * _periods(config, config.theta)), 1.0)


def _dynamic(config: RopeConfig) -> Frequencies:
    if not is_extended(config):
        return _default(config)
    if config.rotary_dim <= 2:
        raise UnsupportedModel(
            "dynamic NTK scaling needs a rotary_dim above 2; check the config.json"
        )
    stretch = frozen_length(config) / config.max_position_embeddings
    growth = config.factor * stretch - (config.factor - 1)
    exponent = config.rotary_dim / (config.rotary_dim - 2)
    return Frequencies(1.0 / _periods(config, config.theta * growth**exponent), 1.0)


def _llama3(config: RopeConfig) -> Frequencies:
    if config.high_freq_factor <= config.low_freq_factor:
        raise InvalidOption(
            "llama3 RoPE needs high_freq_factor above low_freq_factor; check config.json"
        )
    plain = 1.0 / _periods(config, config.theta)
    rotations = original_length(config) * plain / (2 * math.pi)
    # 0 below low_freq_factor full rotations over the original length, 1 above high_freq_factor
    keep = (rotations - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return Frequencies(keep * plain + (1 - keep) * plain / config.factor, 1.0)


def _yarn(config: RopeConfig) -> Frequencies:
    periods = _periods(config, config.theta)
    low, high = _yarn_range(config)
    pairs = torch.arange(config.rotary_dim // 2, dtype=torch.float64)
    interpolate = ((pairs - low) / (high - low)).clamp(0.0, 1.0)
    inverse = interpolate / (config.factor * periods) + (1 - interpolate) / periods
    return Frequencies(inverse, _yarn_attention_factor(config))


def _yarn_range(config: RopeConfig) -> tuple[float, float]:
    """First and last pair of the ramp between original and fully interpolated frequencies."""

    def pair_of(rotations: float) -> float:
        ratio = original_length(config) / (rotations * 2 * math.pi)
        return config.rotary_dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = pair_of(config.beta_fast), pair_of(config.beta_slow)
    if config.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, config.rotary_dim - 1.0)
    # avoids a division by zero, with the width of the reference implementations
    return low, high if high != low else high + 0.001


def _yarn_attention_factor(config: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)


def _longrope(config: RopeConfig) -> Frequencies:
    name = "long_factor" if is_extended(config) else "short_factor"
    factors = config.long_factor if is_extended(config) else config.short_factor
    if len(factors) != config.rotary_dim // 2:
        raise InvalidOption(
            f"longrope's {name} has {len(factors)} values but the model rotates "
            f"{config.rotary_dim // 2} pairs of dims; check rope_scaling in config.json"
        )
    periods = _periods(config, config.theta)
    inverse = 1.0 / (torch.tensor(factors, dtype=torch.float64) * periods)
    return Frequencies(inverse, _longrope_attention_factor(config))


def _longrope_attention_factor(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    if config.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(config.factor) / math.log(original_length(config)))


def _proportional(config: RopeConfig) -> Frequencies:
    inverse = 1.0 / (config.factor * _periods(config, config.theta))
    inverse[int(config.partial_rotary_factor * config.rotary_dim // 2) :] = 0.0
    return Frequencies(inverse, 1.0)


_LAWS: dict[str, Callable[[RopeConfig], Frequencies]] = {
    "none": _none,
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}

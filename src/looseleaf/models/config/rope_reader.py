"""RoPE from a checkpoint's ``config.json``: the law, its parameters and which dims turn.

Both spellings are read: ``rope_theta`` beside ``rope_scaling``, and ``rope_parameters``; and which
layers turn at all, or by a law of their own.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from looseleaf.config import RopeConfig
from looseleaf.errors import CorruptCheckpoint, InvalidOption, UnsupportedModel
from looseleaf.models.checkpoint.fields import (
    Json,
    as_number,
    mapping,
    number,
    rows,
    shown,
    switch,
    text,
    whole,
)
from looseleaf.rope import rope_frequencies

# a law's parameters go by these names in config.json and in RopeConfig
_ROPE_FIELDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        *("truncate", "original_max_position_embeddings"),
    ),
    "longrope": (
        *("factor", "attention_factor", "short_factor", "long_factor"),
        "original_max_position_embeddings",
    ),
}
_ROPE_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
_ORIGINAL = "original_max_position_embeddings"
# what is multiplied with lies between it and its inverse: numbers stay finite in fp32
LEAST_FACTOR = 1e-6
# families of which Transformers turns a part of each head; in others it turns whole heads
_PARTIAL = ("phi", "phi3", "glm", "glm4")
# families that pair dims (2i, 2i + 1)
_INTERLEAVED = ("glm", "glm4")
_DEFAULT_MAX_POSITIONS = {
    **{"mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768, "phi3": 4_096, "gemma2": 8_192},
    **{"glm": 131_072, "glm4": 131_072, "smollm3": 32_768, "gemma3_text": 131_072},
}


def max_positions(raw: Json) -> int:
    """What ``max_position_embeddings`` is, or what the family has it be."""
    default = _DEFAULT_MAX_POSITIONS.get(str(raw["model_type"]), 2048)
    return whole(raw, "max_position_embeddings", default)


def read_rope(raw: Json, head_dim: int, default_fraction: float = 1.0) -> RopeConfig:
    """The law that either spelling describes; where both are there they must mean the same."""
    spellings = [*filter(None, (mapping(raw, n) for n in ("rope_parameters", "rope_scaling")))]
    meant = [_rope_of(raw, one, head_dim, default_fraction) for one in spellings or [{}]]
    if meant[0] != meant[-1]:
        raise UnsupportedModel(
            "rope_parameters and rope_scaling are both there and differ: write the law and its "
            "rope_theta into rope_parameters, and delete rope_scaling"
        )
    return meant[0]


def ropes_by_kind(raw: Json, head_dim: int) -> dict[str, RopeConfig]:
    """Gemma 3's laws of full and of sliding layers: what ``rope_parameters`` has of each kind; in
    older files the former have ``rope_theta`` and ``rope_scaling``, and the others
    ``rope_local_base_freq``."""
    given = mapping(raw, "rope_parameters")
    unknown = [name for name in given if name not in ("full_attention", "sliding_attention")]
    if unknown:
        raise UnsupportedModel(
            f"rope_parameters has {shown(unknown)} beside the laws of full_attention and "
            "sliding_attention: write those of each kind of layer, and nothing else"
        )
    theta = number(raw, "rope_theta", 1e6), number(raw, "rope_local_base_freq", 1e4)
    full = {**mapping(given, "full_attention"), **mapping(raw, "rope_scaling")}
    scalings = {"full_attention": full, "sliding_attention": mapping(given, "sliding_attention")}
    return {
        kind: _rope_of(raw, {"rope_theta": base, **scaling}, head_dim, 1.0)
        for base, (kind, scaling) in zip(theta, scalings.items(), strict=True)
    }


def _rope_of(raw: Json, scaling: Json, head_dim: int, default_fraction: float) -> RopeConfig:
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise UnsupportedModel("RoPE parameters that differ between layers are not implemented")
    law = text(scaling, "rope_type", text(scaling, "type", "default"))
    if raw["model_type"] == "phi3" and law in ("su", "yarn"):
        # early Phi-3 checkpoints call LongRoPE so
        law = "longrope"
    if law != "default" and law not in _ROPE_FIELDS:
        known = ", ".join(["default", *_ROPE_FIELDS])
        raise UnsupportedModel(f"RoPE law {shown(law)} is not implemented; Looseleaf knows {known}")
    fallback = number(raw, "partial_rotary_factor", default_fraction, most=1.0)
    fraction = number(scaling, "partial_rotary_factor", fallback, most=1.0)
    if fraction != 1.0 and raw["model_type"] not in _PARTIAL:
        raise UnsupportedModel(
            f"partial_rotary_factor {fraction} is not implemented for {raw['model_type']}, of "
            "which Transformers turns whole heads; delete it if the model was trained so"
        )
    return RopeConfig(
        head_dim=head_dim,
        rotary_dim=int(head_dim * fraction),
        interleaved=raw["model_type"] in _INTERLEAVED,
        theta=number(scaling, "rope_theta", number(raw, "rope_theta", 10_000.0)),
        law=law,  # type: ignore[arg-type]
        max_position_embeddings=max_positions(raw),
        **_law_parameters(raw, law, scaling),
    )


def _law_parameters(raw: Json, law: str, scaling: Json) -> dict[str, Any]:
    names = [name for name in _ROPE_FIELDS.get(law, ()) if scaling.get(name) is not None]
    for name in _ROPE_REQUIRED.get(law, ()):
        if name not in names:
            raise CorruptCheckpoint(f"RoPE law {law!r} needs {name!r}; check rope_scaling")
    given = {name: _rope_value(name, scaling) for name in names}
    if law in ("llama3", "yarn", "longrope") and raw.get(_ORIGINAL) is not None:
        given[_ORIGINAL] = whole(raw, _ORIGINAL)
    elif raw["model_type"] == "phi3" and law == "longrope":
        given.setdefault(_ORIGINAL, 4096)
    if law in ("yarn", "longrope") and "factor" not in given:
        given["factor"] = max_positions(raw) / given.get(_ORIGINAL, max_positions(raw))
    return given


def _rope_value(name: str, scaling: Json) -> Any:
    if name in ("short_factor", "long_factor"):
        return tuple(as_number(f"each of {name}", item) for item in rows(scaling, name))
    if name == "truncate":
        return switch(scaling, name)
    return whole(scaling, name) if name == _ORIGINAL else number(scaling, name)


def require_frequencies(rope: RopeConfig) -> None:
    """Refuse parameters that are numbers each, and together give none."""
    # a law has one range up to the original length and another behind it
    behind = rope.max_position_embeddings * (2 if rope.law == "dynamic" else 1)
    try:
        for length in (1, behind):
            inverse, factor = rope_frequencies(dataclasses.replace(rope, length=length))
            if not inverse.isfinite().all():
                raise ArithmeticError("a frequency is infinite")
            if not LEAST_FACTOR < factor < 1 / LEAST_FACTOR:
                raise ArithmeticError(f"scores would be multiplied by {factor:g} squared")
    except (ArithmeticError, ValueError) as error:
        if isinstance(error, InvalidOption):
            raise
        raise CorruptCheckpoint(
            f"no frequencies follow from the parameters of RoPE law {rope.law!r} ({error}); "
            "correct them"
        ) from error


def turning_layers(raw: Json, num_layers: int) -> list[bool]:
    """Which layers turn queries and keys: by ``no_rope_layers``, where 1 says that a layer does, or
    all but every so many-th one."""
    if raw.get("no_rope_layers") is None:
        interval = whole(raw, "no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    turning = rows(raw, "no_rope_layers")
    if len(turning) < num_layers or any(value not in (0, 1) for value in turning):
        raise CorruptCheckpoint(
            f"no_rope_layers must be a 0 or a 1 for each of {num_layers} layers, not "
            f"{shown(turning)}; correct it"
        )
    return [bool(value) for value in turning[:num_layers]]


def ropes_of(rope: RopeConfig, turning: Sequence[bool]) -> tuple[RopeConfig, ...]:
    """``rope`` in layers that turn, and a law that turns nothing in others."""
    still = RopeConfig(rope.head_dim, rope.rotary_dim, law="none")
    return () if all(turning) else tuple(rope if turns else still for turns in turning)

"""RoPE settings from a checkpoint's ``config.json``: law, parameters, rotated dims and layers.

Both spellings are read: ``rope_theta`` with ``rope_scaling``, and ``rope_parameters``.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from looseleaf.config import QueryScaling, RopeConfig
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

# parameters of each law, named alike in config.json and RopeConfig
_ROPE_FIELDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "proportional": ("factor", "partial_rotary_factor"),
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
# multipliers are between this and its inverse, so fp32 stays finite
LEAST_FACTOR = 1e-6
# families for which Transformers can rotate a part of each head
_PARTIAL = ("phi", "phi3", "glm", "glm4", "glm4_moe")
# families that rotate the pairs (2i, 2i + 1)
_INTERLEAVED = ("glm", "glm4")
_DEFAULT_MAX_POSITIONS = {
    **{
        "mistral": 131_072,
        "ministral3": 262_144,
        "gpt_oss": 131_072,
        "qwen2": 32_768,
        "qwen3": 32_768,
        "phi3": 4_096,
        "gemma2": 8_192,
    },
    **{"glm": 131_072, "glm4": 131_072, "smollm3": 32_768, "gemma3_text": 131_072},
    **{"mixtral": 131_072, "qwen2_moe": 32_768, "qwen3_moe": 32_768, "olmoe": 4096},
    **{"glm4_moe": 131_072, "gemma4_text": 131_072, "gemma4_unified_text": 262_144},
}


def max_positions(raw: Json) -> int:
    """``max_position_embeddings``, by default the family's."""
    default = _DEFAULT_MAX_POSITIONS.get(str(raw["model_type"]), 2048)
    return whole(raw, "max_position_embeddings", default)


def read_rope(raw: Json, head_dim: int, default_fraction: float = 1.0) -> RopeConfig:
    """The RoPE settings of either spelling. Raises UnsupportedModel if both exist and differ."""
    spellings = [*filter(None, (mapping(raw, n) for n in ("rope_parameters", "rope_scaling")))]
    ropes = [_rope_of(raw, scaling, head_dim, default_fraction) for scaling in spellings or [{}]]
    if ropes[0] != ropes[-1]:
        raise UnsupportedModel(
            "rope_parameters and rope_scaling are both there and differ: write the law and its "
            "rope_theta into rope_parameters, and delete rope_scaling"
        )
    return ropes[0]


def read_query_scaling(raw: Json) -> QueryScaling | None:
    """The factors of queries by position: ``llama_4_scaling_beta`` beside the RoPE law."""
    scaling = mapping(raw, "rope_parameters") or mapping(raw, "rope_scaling")
    beta = number(scaling, "llama_4_scaling_beta", 0.0)
    return QueryScaling(beta, whole(scaling, _ORIGINAL)) if beta else None


def ropes_by_kind(raw: Json, head_dim: int) -> dict[str, RopeConfig]:
    """The RoPE settings of Gemma's full and sliding layers, from ``rope_parameters`` by kind.

    Older files have ``rope_theta`` and ``rope_scaling`` for full layers and
    ``rope_local_base_freq`` for sliding layers."""
    by_kind = mapping(raw, "rope_parameters")
    unknown = [name for name in by_kind if name not in ("full_attention", "sliding_attention")]
    if unknown:
        raise UnsupportedModel(
            f"rope_parameters has {shown(unknown)} beside the laws of full_attention and "
            "sliding_attention: write those of each kind of layer, and nothing else"
        )
    theta = number(raw, "rope_theta", 1e6), number(raw, "rope_local_base_freq", 1e4)
    full = {**mapping(by_kind, "full_attention"), **mapping(raw, "rope_scaling")}
    scalings = {"full_attention": full, "sliding_attention": mapping(by_kind, "sliding_attention")}
    return {
        kind: _rope_of(raw, {"rope_theta": base, **scaling}, head_dim, 1.0)
        for base, (kind, scaling) in zip(theta, scalings.items(), strict=True)
    }


def _rope_of(raw: Json, scaling: Json, head_dim: int, default_fraction: float) -> RopeConfig:
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise UnsupportedModel("RoPE parameters that differ between layers are not implemented")
    law = text(scaling, "rope_type", text(scaling, "type", "default"))
    if raw["model_type"] == "phi3" and law in ("su", "yarn"):
        # names of LongRoPE in early Phi-3 checkpoints
        law = "longrope"
    if law != "default" and law not in _ROPE_FIELDS:
        known = ", ".join(["default", *_ROPE_FIELDS])
        raise UnsupportedModel(f"RoPE law {shown(law)} is not implemented; Looseleaf knows {known}")
    fallback = number(raw, "partial_rotary_factor", default_fraction, most=1.0)
    fraction = number(scaling, "partial_rotary_factor", fallback, most=1.0)
    if law == "proportional":
        # the law rotates all dims, most of them by angles of 0
        fraction = 1.0
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
    parameters = {name: _rope_value(name, scaling) for name in names}
    if law in ("llama3", "yarn", "longrope") and raw.get(_ORIGINAL) is not None:
        parameters[_ORIGINAL] = whole(raw, _ORIGINAL)
    elif raw["model_type"] == "phi3" and law == "longrope":
        parameters.setdefault(_ORIGINAL, 4096)
    if law in ("yarn", "longrope") and "factor" not in parameters:
        parameters["factor"] = max_positions(raw) / parameters.get(_ORIGINAL, max_positions(raw))
    return parameters


def _rope_value(name: str, scaling: Json) -> Any:
    if name in ("short_factor", "long_factor"):
        return tuple(as_number(f"each of {name}", item) for item in rows(scaling, name))
    if name == "truncate":
        return switch(scaling, name)
    return whole(scaling, name) if name == _ORIGINAL else number(scaling, name)


def require_frequencies(rope: RopeConfig) -> None:
    """Raises CorruptCheckpoint if the parameters give no finite frequencies."""
    # some laws differ below and above the original length
    long = rope.max_position_embeddings * (2 if rope.law == "dynamic" else 1)
    try:
        for length in (1, long):
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


def rope_layers(raw: Json, num_layers: int) -> list[bool]:
    """Whether each layer has RoPE: by ``no_rope_layers`` (1 is RoPE) or ``no_rope_layer_interval``.

    Raises CorruptCheckpoint for other values."""
    if raw.get("no_rope_layers") is None:
        interval = whole(raw, "no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    flags = rows(raw, "no_rope_layers")
    if len(flags) < num_layers or any(value not in (0, 1) for value in flags):
        raise CorruptCheckpoint(
            f"no_rope_layers must be a 0 or a 1 for each of {num_layers} layers, not "
            f"{shown(flags)}; correct it"
        )
    return [bool(value) for value in flags[:num_layers]]


def ropes_of(rope: RopeConfig, has_rope: Sequence[bool]) -> tuple[RopeConfig, ...]:
    """``rope`` for each layer with RoPE, law ``none`` for others; empty if all layers have RoPE."""
    nope = RopeConfig(rope.head_dim, rope.rotary_dim, law="none")
    return () if all(has_rope) else tuple(rope if rotates else nope for rotates in has_rope)

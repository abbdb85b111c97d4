"""Latent attention's fields in ``config.json``: DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash."""

import math
from dataclasses import replace
from typing import Any

from looseleaf.config import LatentConfig, RopeConfig
from looseleaf.errors import UnsupportedModel
from looseleaf.models.checkpoint.fields import Json, mapping, number, switch, whole
from looseleaf.models.config.rope_reader import read_rope

_DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
}
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256}
}
# far above the values of real models
_MOST = 1 << 16


def with_defaults(raw: Json) -> Json:
    """``raw`` with the family's values of absent fields."""
    return {**_DEFAULTS, **_FAMILY_DEFAULTS.get(str(raw["model_type"]), {}), **raw}


def latent_fields(raw: Json) -> dict[str, Any]:
    """The fields of `ModelConfig` that describe latent attention.

    Raises UnsupportedModel for biases of attention."""
    if switch(raw, "attention_bias"):
        raise UnsupportedModel(
            "attention_bias is true, and latent attention with biases is not implemented: use a "
            "checkpoint without them"
        )
    latent = LatentConfig(
        rank=whole(raw, "kv_lora_rank", most=_MOST),
        nope_dim=whole(raw, "qk_nope_head_dim", most=_MOST),
        rope_dim=whole(raw, "qk_rope_head_dim", most=_MOST),
        value_dim=whole(raw, "v_head_dim", most=_MOST),
        query_rank=0 if raw["q_lora_rank"] is None else whole(raw, "q_lora_rank", most=_MOST),
    )
    # the rotated dims are the first of a stored key
    rope = replace(
        read_rope(raw, latent.rope_dim),
        head_dim=latent.key_dim,
        interleaved=raw["model_type"] == "deepseek_v2" or switch(raw, "rope_interleave", True),
    )
    return {
        "num_kv_heads": 1,
        "head_dim": latent.key_dim,
        "rope": rope,
        "softmax_scale": latent.query_dim**-0.5 * _scale_factor(raw, rope),
        "latent": latent,
    }


def _scale_factor(raw: Json, rope: RopeConfig) -> float:
    """DeepSeek's factor of the softmax scale, for a RoPE law with ``mscale_all_dim``."""
    scaling = mapping(raw, "rope_parameters") or mapping(raw, "rope_scaling")
    weight = number(scaling, "mscale_all_dim", 0.0)
    if rope.law == "default" or not weight or rope.factor <= 1:
        return 1.0
    return (0.1 * weight * math.log(rope.factor) + 1.0) ** 2

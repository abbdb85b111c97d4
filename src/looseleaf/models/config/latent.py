"""Fields of models with latent attention: DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from looseleaf.config import ExpertConfig, LatentConfig, ModelConfig, RopeConfig
from looseleaf.errors import UnsupportedModel
from looseleaf.models.checkpoint.fields import (
    Json,
    mapping,
    number,
    rows,
    shown,
    switch,
    text,
    whole,
)
from looseleaf.models.config.experts import MAX_GROUPS, MAX_SHARED, read_experts
from looseleaf.models.config.families import factor, gated
from looseleaf.models.config.rope_reader import read_rope

_DEFAULTS: dict[str, Any] = {
    **{"kv_lora_rank": 512, "q_lora_rank": 1536, "v_head_dim": 128, "rms_norm_eps": 1e-6},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "n_group": 8, "topk_group": 4},
    **{"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
    **{"n_shared_experts": 1, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3},
}
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        **{"n_routed_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2},
        **{"routed_scaling_factor": 1.0, "first_k_dense_replace": 0, "topk_method": "greedy"},
    },
    "glm4_moe_lite": {
        **{"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5},
        **{"n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536},
        **{"routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1},
    },
}
# far above the values of real models
_MOST = 1 << 16


def _with_defaults(raw: Json) -> Json:
    """``raw`` with the family's values of absent fields."""
    return {**_DEFAULTS, **_FAMILY_DEFAULTS.get(str(raw["model_type"]), {}), **raw}


def _latent_fields(raw: Json) -> dict[str, Any]:
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


def _latent_experts(raw: Json, num_layers: int) -> ExpertConfig | None:
    """The experts of these families; None if all layers are dense. Raises UnsupportedModel."""
    law: dict[str, Any] = {
        "num_experts": raw["n_routed_experts"],
        "top_k": raw["num_experts_per_tok"],
        "inner": raw["moe_intermediate_size"],
        "num_shared": whole(raw, "n_shared_experts", 0, least=0, most=MAX_SHARED),
        "scaling": factor(raw, "routed_scaling_factor", 1.0),
    }
    if raw["model_type"] == "deepseek_v2":
        law |= {"normalized": False, "group_scores": 1}
    else:
        normalized = switch(raw, "norm_topk_prob", True)
        law |= {"scoring": "sigmoid", "selection_bias": True, "normalized": normalized}
    if _has_groups(raw):
        groups = (whole(raw, name, most=MAX_GROUPS) for name in ("n_group", "topk_group"))
        law |= dict(zip(("num_groups", "top_groups"), groups, strict=True))
    experts = read_experts(raw, **law)
    if raw["model_type"] == "glm4_moe_lite":
        kinds = rows(raw, "mlp_layer_types") or ["dense"] + ["sparse"] * (num_layers - 1)
        dense = tuple(n for n, kind in enumerate(kinds) if kind == "dense")
        experts = replace(experts, dense_layers=dense)
    return None if len(experts.dense_layers) == num_layers else experts


def _has_groups(raw: Json) -> bool:
    """Whether the router chooses groups of experts first."""
    if raw["model_type"] != "deepseek_v2":
        return True
    method = text(raw, "topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModel(
            f"topk_method {shown(method)} is not implemented: use greedy or group_limited_greedy"
        )
    return method != "greedy"


def _scale_factor(raw: Json, rope: RopeConfig) -> float:
    """DeepSeek's factor of the softmax scale, for a RoPE law with ``mscale_all_dim``."""
    scaling = mapping(raw, "rope_parameters") or mapping(raw, "rope_scaling")
    weight = number(scaling, "mscale_all_dim", 0.0)
    if rope.law == "default" or not weight or rope.factor <= 1:
        return 1.0
    return (0.1 * weight * math.log(rope.factor) + 1.0) ** 2


def _latent(raw: Json) -> ModelConfig:
    raw = _with_defaults(raw)
    common = gated(raw)
    return ModelConfig(
        **{**common, **_latent_fields(raw)},
        mlp_bias=common["family"] == "deepseek_v2" and switch(raw, "mlp_bias"),
        experts=_latent_experts(raw, common["num_layers"]),
    )


LATENTS: dict[str, Callable[[Json], ModelConfig]] = {
    "deepseek_v2": _latent,
    "deepseek_v3": _latent,
    # Kimi K2 is DeepSeek V3 by another name
    "kimi_k2": _latent,
    "glm4_moe_lite": _latent,
}

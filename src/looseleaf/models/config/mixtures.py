"""Fields and defaults of families with mixtures of experts, as Transformers interprets them."""

from collections.abc import Callable
from dataclasses import replace

from looseleaf.config import ModelConfig
from looseleaf.errors import UnsupportedModel
from looseleaf.models.checkpoint.fields import Json, rows, switch, whole
from looseleaf.models.config.experts import (
    MAX_GROUPS,
    MAX_SHARED,
    read_experts,
    shared_experts,
)
from looseleaf.models.config.families import (
    factor,
    gated,
    granite,
    uniform_windows,
    windows_of,
)


def _lower_windows(raw: Json, num_layers: int) -> tuple[int, ...]:
    """Windows of Qwen2's mixtures: every other layer below ``max_window_layers``, if enabled."""
    window = whole({"sliding_window": 4096, **raw}, "sliding_window", 0, least=0)
    enabled = switch(raw, "use_sliding_window")
    kinds = rows(raw, "layer_types")
    if raw.get("layer_types") is None:
        lower = whole(raw, "max_window_layers", 28, least=0) * enabled
        slides = [i % 2 == 0 and i < lower for i in range(num_layers)]
        kinds = ["sliding_attention" if slide else "full_attention" for slide in slides]
    return windows_of(kinds, window * enabled, num_layers)


def _mixtral(raw: Json) -> ModelConfig:
    raw = {"num_key_value_heads": 8, "rope_theta": 1e6, **raw}
    common = gated(raw, norm_eps=1e-5)
    return ModelConfig(
        **common,
        windows=uniform_windows(raw, common["num_layers"]),
        experts=read_experts(raw, normalized=True, num_experts=8, top_k=2),
    )


def _qwen3_moe(raw: Json) -> ModelConfig:
    raw = {"num_key_value_heads": 4, **raw}
    common, bias = gated(raw), switch(raw, "attention_bias")
    window = {"sliding_window": 4096, **raw} if switch(raw, "use_sliding_window") else {}
    return ModelConfig(
        **common,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        windows=uniform_windows(window, common["num_layers"]),
        experts=read_experts(raw, num_experts=128, top_k=8, inner=768),
    )


def _gpt_oss(raw: Json) -> ModelConfig:
    yarn = {
        **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0},
        **{"truncate": False, "original_max_position_embeddings": 4096, "rope_theta": 150_000.0},
    }
    spelled = raw.get("rope_parameters") or raw.get("rope_scaling")
    defaults = {
        **{"head_dim": 64, "num_key_value_heads": 8, "rope_theta": 150_000.0},
        **({} if spelled else {"rope_parameters": yarn}),
    }
    raw = {**defaults, **raw}
    common, bias = gated(raw, norm_eps=1e-5), switch(raw, "attention_bias", True)
    kinds = rows(raw, "layer_types")
    if raw.get("layer_types") is None:
        layers = range(common["num_layers"])
        kinds = ["full_attention" if i % 2 else "sliding_attention" for i in layers]
    window = whole({"sliding_window": 128, **raw}, "sliding_window", 0, least=0)
    experts = {"normalized": True, "router_bias": True, "expert_bias": True}
    return ModelConfig(
        **{**common, "activation": "swigluoai"},
        swiglu_alpha=factor(raw, "swiglu_alpha", 1.702),
        swiglu_limit=factor(raw, "swiglu_limit", 7.0),
        qkv_bias=bias,
        output_bias=bias,
        sinks=True,
        windows=windows_of(kinds, window, common["num_layers"]),
        experts=read_experts(raw, num_experts=128, top_k=4, **experts),
    )


def _qwen2_moe(raw: Json) -> ModelConfig:
    common = gated(raw)
    inner = whole(raw, "moe_intermediate_size", 1408)
    return ModelConfig(
        **common,
        qkv_bias=switch(raw, "qkv_bias", True),
        windows=_lower_windows(raw, common["num_layers"]),
        experts=read_experts(
            raw,
            num_experts=60,
            top_k=4,
            inner=1408,
            num_shared=shared_experts(raw, "shared_expert_intermediate_size", 5632, inner),
            shared_gate=True,
        ),
    )


def _olmoe(raw: Json) -> ModelConfig:
    if raw.get("clip_qkv") is not None:
        raise UnsupportedModel(
            "clip_qkv, which bounds queries, keys and values, is not implemented: use a "
            "checkpoint without it"
        )
    common, bias = gated(raw, norm_eps=1e-5), switch(raw, "attention_bias")
    return ModelConfig(
        **common,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        joint_qk_norm=True,
        experts=read_experts(raw, num_experts=64, top_k=8),
    )


def _glm4_moe(raw: Json) -> ModelConfig:
    defaults = {"num_key_value_heads": 8, "partial_rotary_factor": 0.5, "first_k_dense_replace": 1}
    raw = {**defaults, **raw}
    return ModelConfig(
        **gated(raw, norm_eps=1e-5),
        qkv_bias=switch(raw, "attention_bias"),
        qk_norm=switch(raw, "use_qk_norm"),
        experts=read_experts(
            raw,
            num_experts=128,
            top_k=8,
            inner=1408,
            normalized=switch(raw, "norm_topk_prob", True),
            scoring="sigmoid",
            scaling=factor(raw, "routed_scaling_factor", 1.0),
            selection_bias=True,
            num_groups=whole(raw, "n_group", 1, most=MAX_GROUPS),
            top_groups=whole(raw, "topk_group", 1, most=MAX_GROUPS),
            num_shared=whole(raw, "n_shared_experts", 1, most=MAX_SHARED),
        ),
    )


def _granitemoe(raw: Json) -> ModelConfig:
    experts = read_experts(raw, num_experts=8, top_k=2, normalized=True)
    # its experts have no biases
    return replace(granite({**raw, "mlp_bias": False}), experts=experts)


MIXTURES: dict[str, Callable[[Json], ModelConfig]] = {
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "glm4_moe": _glm4_moe,
    "granitemoe": _granitemoe,
}

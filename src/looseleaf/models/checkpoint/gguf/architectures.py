"""From a container's metadata to the fields of ``config.json``, for each architecture.

Keys of metadata are those of the GGUF specification. Values that a file leaves out are those of the
architecture's published models.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from looseleaf.errors import UnsupportedModel
from looseleaf.models.checkpoint.gguf.metadata import Metadata

Fields = dict[str, Any]
Floats = Mapping[str, np.ndarray]
"""Small tensors of a file that belong to its configuration, fp32, by name."""

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# DeepSeek V3's groups of experts, which older files leave out; `expert_gating_func` of a sigmoid
_V3_EXPERTS, _V3_GROUPS, _SIGMOID = 256, (8, 4), 2
# the law of Llama 3.1 and later; files store its factors only
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original": 8192}


def config_fields(data: Metadata, names: frozenset[str], floats: Floats) -> Fields:
    """``config.json`` of a file with the tensors ``names``. Raises UnsupportedModel."""
    build = _ARCHITECTURES.get(data.architecture)
    if build is None:
        raise UnsupportedModel(
            f"general.architecture {data.architecture[:100]!r} is not supported: GGUF files of "
            f"{', '.join(sorted(_ARCHITECTURES))} are"
        )
    own, heads = data.own, data.whole(data.own("attention.head_count"))
    hidden = data.whole(own("embedding_length"))
    fields: Fields = {
        "hidden_size": hidden,
        "intermediate_size": data.whole(own("feed_forward_length")),
        "num_hidden_layers": data.whole(own("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": data.whole(own("attention.head_count_kv"), heads),
        "head_dim": data.whole(own("attention.key_length"), hidden // max(heads, 1)),
        "rms_norm_eps": data.real(own("attention.layer_norm_rms_epsilon"), 1e-6),
        "max_position_embeddings": data.whole(own("context_length")),
        "rope_theta": data.real(own("rope.freq_base"), 10_000.0),
        "vocab_size": data.count("tokenizer.ggml.tokens"),
        "tie_word_embeddings": "output.weight" not in names,
    }
    return {**fields, **build(data, names, floats, fields)}


def _scaling(data: Metadata) -> Fields:
    """The RoPE law of the ``rope.scaling`` fields."""
    kind = data.text(data.own("rope.scaling.type"), "none")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"{data.own('rope.scaling.type')} {kind[:100]!r} is not supported")
    law: Fields = {"rope_type": kind, "factor": data.real(data.own("rope.scaling.factor"))}
    original = data.own("rope.scaling.original_context_length")
    if kind == "yarn" and original in data:
        law["original_max_position_embeddings"] = data.whole(original)
    return {"rope_scaling": law}


def _llama3_law(fields: Fields, factors: np.ndarray) -> Fields:
    """The law ``llama3`` whose factors per pair of dimensions are ``factors``."""
    factor, original = float(factors.max()), _LLAMA3["original"]
    frequency = fields["rope_theta"] ** -(np.arange(len(factors)) / len(factors))
    wavelength = 2 * np.pi / frequency
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if len(factors) * 2 != fields["head_dim"] or not np.allclose(factors, expected, rtol=1e-3):
        raise UnsupportedModel(
            "rope_freqs.weight holds factors that are not those of Llama 3; use the safetensors "
            "checkpoint"
        )
    law = {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": original}
    return {"rope_scaling": {**law, "low_freq_factor": low, "high_freq_factor": high}}


def _biases(names: frozenset[str]) -> Fields:
    """Whether attention and MLP have biases, by the tensors of the first layer."""
    return {
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
    }


def _llama(data: Metadata, names: frozenset[str], floats: Floats, fields: Fields) -> Fields:
    law = _scaling(data)
    if "rope_freqs.weight" in floats:
        law = _llama3_law(fields, floats["rope_freqs.weight"])
    if data.own("expert_count") in data and data.whole(data.own("expert_count")) > 0:
        return {"model_type": "mixtral", "sliding_window": None, **_experts(data), **law}
    return {
        "model_type": "llama",
        **_biases(names),
        **law,
    }


def _mistral3(data: Metadata, names: frozenset[str], floats: Floats, fields: Fields) -> Fields:
    if data.own("expert_count") in data and data.whole(data.own("expert_count")) > 0:
        raise UnsupportedModel("mistral3 with experts is not supported: use a dense model")
    more, beta = _scaling(data), data.own("attention.temperature_scale")
    if beta not in data:
        return {"model_type": "mistral", "sliding_window": None, **more}
    law = more.pop("rope_scaling", {"rope_type": "default"})
    if data.own("rope.scaling.yarn_log_multiplier") in data:
        # both factors are equal, so that YaRN scales no scores
        law |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    original = "original_max_position_embeddings"
    period = data.whole(data.own("attention.temperature_length"), law.get(original, 0))
    return {
        "model_type": "ministral3",
        "rope_parameters": {**law, "llama_4_scaling_beta": data.real(beta), original: period},
        **more,
    }


def _experts(data: Metadata) -> Fields:
    """The number of experts, and that of a row."""
    return {
        "num_experts": data.whole(data.own("expert_count")),
        "num_experts_per_tok": data.whole(data.own("expert_used_count")),
    }


def _qwen2_moe(data: Metadata, names: frozenset[str], floats: Floats, fields: Fields) -> Fields:
    own = data.own
    return {
        "model_type": "qwen2_moe",
        "use_sliding_window": False,
        "norm_topk_prob": False,
        "moe_intermediate_size": data.whole(own("expert_feed_forward_length")),
        "shared_expert_intermediate_size": data.whole(own("expert_shared_feed_forward_length")),
        **_experts(data),
        **_scaling(data),
    }


def _qwen3_moe(data: Metadata, names: frozenset[str], floats: Floats, fields: Fields) -> Fields:
    return {
        "model_type": "qwen3_moe",
        "norm_topk_prob": True,
        "moe_intermediate_size": data.whole(data.own("expert_feed_forward_length")),
        **_experts(data),
        **_scaling(data),
    }


def _gpt_oss(data: Metadata, names: frozenset[str], floats: Floats, fields: Fields) -> Fields:
    law = _scaling(data) or {"rope_scaling": {"rope_type": "default"}}
    law["rope_scaling"]["truncate"] = False
    inner = data.own("expert_feed_forward_length")
    return {
        "model_type": "gpt_oss",
        "intermediate_size": data.whole(inner, fields["intermediate_size"]),
        "sliding_window": data.whole(data.own("attention.sliding_window"), 128),
        "attention_bias": "blk.0.attn_q.bias" in names,
        **_experts(data),
        **law,
    }


def _olmoe(data: Metadata, names: frozenset[str], floats: Floats, fields: Fields) -> Fields:
    return {"model_type": "olmoe", "norm_topk_prob": False, **_experts(data), **_scaling(data)}


def _glm4_moe(data: Metadata, names: frozenset[str], floats: Floats, fields: Fields) -> Fields:
    own = data.own
    rotary = data.whole(own("rope.dimension_count"), fields["head_dim"])
    return {
        "model_type": "glm4_moe",
        "attention_bias": "blk.0.attn_q.bias" in names,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in names,
        "partial_rotary_factor": rotary / fields["head_dim"],
        "num_hidden_layers": _predicted_from(data, fields),
        **_shared_experts(data),
        "norm_topk_prob": data.flag(own("expert_weights_norm"), True),
        "n_group": data.whole(own("expert_group_count"), 1),
        "topk_group": data.whole(own("expert_group_used_count"), 1),
        **_experts(data),
        **_scaling(data),
    }


def _deepseek2(data: Metadata, names: frozenset[str], floats: Floats, fields: Fields) -> Fields:
    """DeepSeek V2 and V3, Kimi K2 and GLM-4.7-Flash; the laws of the last two are V3's."""
    own, counts, law = data.own, _experts(data), _scaling(data)
    rotated = data.whole(own("rope.dimension_count"))
    # older files state the sizes of expanded keys and values under the plain names
    key_dim, value_dim = (
        data.whole(own(f"attention.{side}_length_mla"), data.whole(own(f"attention.{side}_length")))
        for side in ("key", "value")
    )
    multiplier = data.real(own("rope.scaling.yarn_log_multiplier"), 0.0)
    if law and multiplier:
        # both factors are equal, so that YaRN scales no scores by itself
        weight = 10 * multiplier
        law["rope_scaling"] |= {"mscale": weight, "mscale_all_dim": weight}
    # files without this field are of V2, or have the bias of a choice
    biased = any(".exp_probs_b." in name for name in names)
    sigmoid = data.whole(own("expert_gating_func"), _SIGMOID if biased else 0) == _SIGMOID
    groups = _V3_GROUPS if sigmoid and counts["num_experts"] == _V3_EXPERTS else (1, 1)
    num_groups = data.whole(own("expert_group_count"), groups[0])
    has_query_rank = own("attention.q_lora_rank") in data
    return {
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "num_hidden_layers": _predicted_from(data, fields),
        "head_dim": rotated,
        "kv_lora_rank": data.whole(own("attention.kv_lora_rank")),
        "q_lora_rank": data.whole(own("attention.q_lora_rank")) if has_query_rank else None,
        "qk_nope_head_dim": key_dim - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value_dim,
        "n_routed_experts": counts.pop("num_experts"),
        **_shared_experts(data),
        "norm_topk_prob": data.flag(own("expert_weights_norm"), False),
        "topk_method": "group_limited_greedy" if num_groups > 1 else "greedy",
        "n_group": num_groups,
        "topk_group": data.whole(own("expert_group_used_count"), groups[1]),
        **counts,
        **law,
    }


def _predicted_from(data: Metadata, fields: Fields) -> int:
    """The number of layers before those that predict further tokens."""
    return int(fields["num_hidden_layers"]) - data.whole(data.own("nextn_predict_layers"), 0)


def _shared_experts(data: Metadata) -> Fields:
    """Sizes of the experts, the shared ones, dense layers, and the factor of routed experts."""
    own = data.own
    return {
        "moe_intermediate_size": data.whole(own("expert_feed_forward_length")),
        "n_shared_experts": data.whole(own("expert_shared_count"), 1),
        "first_k_dense_replace": data.whole(own("leading_dense_block_count"), 1),
        "routed_scaling_factor": data.real(own("expert_weights_scale"), 1.0),
    }


def _granite_moe(data: Metadata, names: frozenset[str], floats: Floats, fields: Fields) -> Fields:
    return {**_granite(data, names, floats, fields), "model_type": "granitemoe", **_experts(data)}


def _qwen2(data: Metadata, names: frozenset[str], floats: Floats, fields: Fields) -> Fields:
    return {"model_type": "qwen2", "use_sliding_window": False, **_scaling(data)}


def _qwen3(data: Metadata, names: frozenset[str], floats: Floats, fields: Fields) -> Fields:
    return {"model_type": "qwen3", "use_sliding_window": False, **_scaling(data)}


def _gemma2(data: Metadata, names: frozenset[str], floats: Floats, fields: Fields) -> Fields:
    # Gemma 2 27B alone scales by its width per head
    is_largest = fields["num_hidden_layers"] == 46
    per_head = fields["hidden_size"] // fields["num_attention_heads"]
    return {
        "model_type": "gemma2",
        "sliding_window": data.whole(data.own("attention.sliding_window"), 4096),
        "attn_logit_softcapping": data.real(data.own("attn_logit_softcapping"), 50.0),
        "final_logit_softcapping": data.real(data.own("final_logit_softcapping"), 30.0),
        "query_pre_attn_scalar": per_head if is_largest else fields["head_dim"],
    }


def _gemma3(data: Metadata, names: frozenset[str], floats: Floats, fields: Fields) -> Fields:
    # Gemma 3 27B alone scales by its width per head
    is_largest = fields["num_hidden_layers"] == 62
    per_head = fields["hidden_size"] // fields["num_attention_heads"]
    return {
        "model_type": "gemma3_text",
        "sliding_window": data.whole(data.own("attention.sliding_window")),
        "sliding_window_pattern": 6,
        "rope_theta": data.real(data.own("rope.freq_base"), 1e6),
        "rope_local_base_freq": 10_000.0,
        "query_pre_attn_scalar": per_head if is_largest else fields["head_dim"],
        **_scaling(data),
    }


def _phi3(data: Metadata, names: frozenset[str], floats: Floats, fields: Fields) -> Fields:
    rotary = data.whole(data.own("rope.dimension_count"), fields["head_dim"])
    more: Fields = {
        "model_type": "phi3",
        "sliding_window": data.whole(data.own("attention.sliding_window"), 0) or None,
        "partial_rotary_factor": rotary / fields["head_dim"],
    }
    if {"rope_factors_long.weight", "rope_factors_short.weight"} <= floats.keys():
        original = data.own("rope.scaling.original_context_length")
        more["original_max_position_embeddings"] = data.whole(original, 4096)
        more["rope_scaling"] = {
            "rope_type": "longrope",
            "long_factor": floats["rope_factors_long.weight"].tolist(),
            "short_factor": floats["rope_factors_short.weight"].tolist(),
        }
    return more


def _glm4(data: Metadata, names: frozenset[str], floats: Floats, fields: Fields) -> Fields:
    rotary = data.whole(data.own("rope.dimension_count"), fields["head_dim"])
    return {
        "model_type": "glm4" if "blk.0.post_attention_norm.weight" in names else "glm",
        "attention_bias": "blk.0.attn_q.bias" in names,
        "partial_rotary_factor": rotary / fields["head_dim"],
    }


def _granite(data: Metadata, names: frozenset[str], floats: Floats, fields: Fields) -> Fields:
    return {
        "model_type": "granite",
        **_biases(names),
        "embedding_multiplier": data.real(data.own("embedding_scale"), 1.0),
        "residual_multiplier": data.real(data.own("residual_scale"), 1.0),
        "attention_multiplier": data.real(data.own("attention.scale"), fields["head_dim"] ** -0.5),
        "logits_scaling": data.real(data.own("logit_scale"), 1.0),
        **_scaling(data),
    }


def _olmo2(data: Metadata, names: frozenset[str], floats: Floats, fields: Fields) -> Fields:
    return {"model_type": "olmo2", **_scaling(data)}


def _exaone4(data: Metadata, names: frozenset[str], floats: Floats, fields: Fields) -> Fields:
    law = _scaling(data)
    if "rope_freqs.weight" in floats:
        law = _llama3_law(fields, floats["rope_freqs.weight"])
    # every fourth layer is full, if there are windows
    window = data.whole(data.own("attention.sliding_window"), 0) or None
    return {
        **{"model_type": "exaone4", "sliding_window": window, "sliding_window_pattern": 4},
        **({} if window else {"layer_types": ["full_attention"] * fields["num_hidden_layers"]}),
        **law,
    }


def _smollm3(data: Metadata, names: frozenset[str], floats: Floats, fields: Fields) -> Fields:
    layers = range(fields["num_hidden_layers"])
    # every fourth layer has no RoPE
    return {
        "model_type": "smollm3",
        **_biases(names),
        "no_rope_layers": [int((i + 1) % 4 != 0) for i in layers],
        "use_sliding_window": False,
        **_scaling(data),
    }


_ARCHITECTURES: dict[str, Callable[[Metadata, frozenset[str], Floats, Fields], Fields]] = {
    "llama": _llama,
    "mistral": _llama,
    "mistral3": _mistral3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "glm4": _glm4,
    "granite": _granite,
    "olmo2": _olmo2,
    "exaone4": _exaone4,
    "smollm3": _smollm3,
    "qwen2moe": _qwen2_moe,
    "qwen3moe": _qwen3_moe,
    "gpt-oss": _gpt_oss,
    "olmoe": _olmoe,
    "glm4moe": _glm4_moe,
    "deepseek2": _deepseek2,
    "granitemoe": _granite_moe,
}

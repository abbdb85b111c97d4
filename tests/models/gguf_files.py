"""Writes a Transformers model as a GGUF file, as converters do."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import ExpertGatingFuncType, GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import quantize

from looseleaf.models.tokenizer.detokenizer import byte_alphabet

ARCHITECTURES = {
    **{"gemma3_text": "gemma3", "glm": "glm4", "mistral": "llama", "mixtral": "llama"},
    **{"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "glm4_moe": "glm4moe"},
    **{"ministral3": "mistral3", "gpt_oss": "gpt-oss"},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), "deepseek2"),
}
_ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    **{f"mlp.shared_expert.{n}_proj": f"ffn_{n}_shexp" for n in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{n}_proj": f"ffn_{n}_shexp" for n in ("gate", "up", "down")},
}
_SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_FAMILY_PARTS = {
    "gemma2": _SANDWICH,
    "gemma3_text": _SANDWICH,
    "olmo2": _SANDWICH,
    "exaone4": _SANDWICH,
    "gpt_oss": {
        "post_attention_layernorm": "post_attention_norm",
        "mlp.router": "ffn_gate_inp",
    },
    "glm4_moe": {"post_attention_layernorm": "post_attention_norm"},
    "glm4": {
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    },
}
_WINDOWED = ("gemma2", "gemma3_text", "phi3", "exaone4", "gpt_oss")
INTERLEAVED = ("llama", "granite", "smollm3", "ministral3", "mixtral", "granitemoe")
TOKENS = [*byte_alphabet(), "ab", *(f"<t{i}>" for i in range(257, 320))]


def tensors_of(model: Any) -> dict[str, np.ndarray]:
    """The tensors of ``model`` by their names in a file, fp32."""
    config = model.config
    family = config.model_type
    parts = {**_PARTS, **_FAMILY_PARTS.get(family, {})}
    tensors = {}
    for name, value in model.state_dict().items():
        array = value.float().numpy()
        if family in ("gemma2", "gemma3_text") and name.endswith("norm.weight"):
            array = array + 1
        if name in _ENDS:
            if name != "lm_head.weight" or not config.tie_word_embeddings:
                tensors[_ENDS[name]] = array
            continue
        _, _, layer, rest = name.split(".", 3)
        if family == "gpt_oss" and (".experts." in rest or rest.endswith("sinks")):
            tensors |= _of_gpt_oss(f"blk.{layer}.", rest, array)
            continue
        if ".experts." in rest or rest.endswith("correction_bias"):
            tensors |= _of_experts(f"blk.{layer}.", rest, array)
            continue
        if rest == "self_attn.kv_b_proj.weight":
            tensors |= _of_latents(f"blk.{layer}.", config, array)
            continue
        part, kind = rest.rsplit(".", 1)
        if part == "mlp.shared_expert_gate":
            array = array[0]
        if family in INTERLEAVED and part.endswith(("q_proj", "k_proj")):
            is_q = part.endswith("q_proj")
            heads = config.num_attention_heads if is_q else config.num_key_value_heads
            shape = array.shape
            array = array.reshape(heads, 2, -1, *shape[1:]).swapaxes(1, 2).reshape(shape)
        tensors[f"blk.{layer}.{parts[part]}.{kind}"] = array
    return tensors


def _of_experts(prefix: str, rest: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """A tensor of all experts of a layer."""
    if rest.endswith("gate_up_proj"):
        gate, up = np.split(array, 2, 1)
        return {f"{prefix}ffn_gate_exps.weight": gate, f"{prefix}ffn_up_exps.weight": up}
    name = "ffn_down_exps.weight" if rest.endswith("down_proj") else "exp_probs_b.bias"
    return {prefix + name: array}


def _of_latents(prefix: str, config: Any, array: np.ndarray) -> dict[str, np.ndarray]:
    """The map of latents: one matrix in older files, here V2's, else two tensors."""
    if config.model_type == "deepseek_v2":
        return {f"{prefix}attn_kv_b.weight": array}
    heads = array.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    keys, values = np.split(heads, [config.qk_nope_head_dim], 1)
    return {f"{prefix}attn_k_b.weight": keys.swapaxes(1, 2), f"{prefix}attn_v_b.weight": values}


def _of_gpt_oss(prefix: str, rest: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """Sinks, or a tensor of all experts, whose columns of gate and up alternate."""
    if rest.endswith("sinks"):
        return {f"{prefix}attn_sinks.weight": array}
    kind = "bias" if rest.endswith("bias") else "weight"
    if "gate_up" in rest:
        pairs = [("gate", array[..., 0::2]), ("up", array[..., 1::2])]
    else:
        pairs = [("down", array)]
    return {
        f"{prefix}ffn_{name}_exps.{kind}": x.swapaxes(1, 2) if kind == "weight" else x
        for name, x in pairs
    }


def metadata_of(config: Any, writer: GGUFWriter) -> None:
    """Write the configuration's fields and a vocabulary of bytes."""
    family = config.model_type
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ropes = config.rope_parameters
    rope = ropes.get("full_attention", ropes)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if hasattr(config, "kv_lora_rank"):
        _write_latents(config, writer)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(head_dim)
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if getattr(config, "sliding_window", None) and family in _WINDOWED:
        writer.add_sliding_window(config.sliding_window)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if hasattr(config, "num_experts_per_tok"):
        _write_experts(config, writer)
    if family in ("granite", "granitemoe"):
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if family == "ministral3":
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        writer.add_attn_temperature_length(rope["original_max_position_embeddings"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(TOKENS[: config.vocab_size])
    writer.add_token_types([1] * 257 + [3] * (config.vocab_size - 257))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(257)


def _write_latents(config: Any, writer: GGUFWriter) -> None:
    """The sizes of expanded keys and values, and in newer files of stored keys."""
    expanded = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    stored = config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank
    is_old = config.model_type == "deepseek_v2"
    writer.add_head_count_kv(config.num_attention_heads if is_old else 1)
    key_length, value_length = expanded if is_old else stored
    writer.add_key_length(key_length)
    writer.add_value_length(value_length)
    if not is_old:
        writer.add_key_length_mla(expanded[0])
        writer.add_value_length_mla(expanded[1])
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)


def _write_experts(config: Any, writer: GGUFWriter) -> None:
    names = "num_local_experts", "num_experts", "n_routed_experts"
    writer.add_expert_count(next(filter(None, (getattr(config, n, None) for n in names))))
    writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if hasattr(config, "n_shared_experts"):
        writer.add_expert_shared_count(config.n_shared_experts)
        dense = getattr(config, "first_k_dense_replace", None)
        if dense is None:
            dense = config.mlp_layer_types.count("dense")
        writer.add_leading_dense_block_count(dense)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        if config.norm_topk_prob:
            writer.add_expert_weights_norm(True)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def write_gguf(path: Path, model: Any, kind: str = "F32") -> Path:
    """``model`` as a file; its matrices are stored in the format ``kind``."""
    family = model.config.model_type
    writer = GGUFWriter(path, ARCHITECTURES.get(family, family))
    metadata_of(model.config, writer)
    number = GGMLQuantizationType[kind]
    for name, array in tensors_of(model).items():
        stored = array if array.ndim < 2 or kind == "F32" else quantize(array, number)
        raw = None if stored is array else number
        writer.add_tensor(name, np.ascontiguousarray(stored), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

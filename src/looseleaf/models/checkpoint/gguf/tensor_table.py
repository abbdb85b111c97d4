"""Names of a file's tensors in Transformers' spelling, and values that converters changed."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from looseleaf.errors import CorruptCheckpoint
from looseleaf.models.checkpoint.gguf.architectures import ROPE_TENSORS
from looseleaf.models.checkpoint.gguf.container import StoredTensor
from looseleaf.models.checkpoint.header import TensorEntry

_ENDS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# tensors of all experts [experts, features, columns], by the name of an expert's matrix
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SHARED = {
    f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")
}
_LATENT = {
    **_EXPERTS,
    **_SHARED,
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    # older files have the maps of keys and values in one matrix
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
_ONE_ROW = "mlp.shared_expert_gate.weight"
_FUSED_UP = {"ffn_up": "mlp.gate_up_proj"}
# names by family where they differ
_PARTS = {
    "gemma2": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        **_FUSED_UP,
    },
    "olmo2": {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "phi3": _FUSED_UP,
    "glm": _FUSED_UP,
    "mixtral": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
    "granitemoe": {
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.gate_proj",
        "ffn_up_exps": "block_sparse_moe.experts.{}.up_proj",
        "ffn_down_exps": "block_sparse_moe.experts.{}.down_proj",
    },
    "qwen2_moe": {
        **_EXPERTS,
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    },
    "qwen3_moe": _EXPERTS,
    "gpt_oss": {
        **_EXPERTS,
        "ffn_gate_inp": "mlp.router",
        "attn_sinks": "self_attn.sinks",
        "post_attention_norm": "post_attention_layernorm",
    },
    "olmoe": _EXPERTS,
    "glm4_moe": {
        **_EXPERTS,
        "post_attention_norm": "post_attention_layernorm",
        "exp_probs_b": "mlp.gate.e_score_correction_bias",
        **_SHARED,
    },
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
}
_PARTS["gemma3_text"] = _PARTS["gemma2"]
_PARTS["exaone4"] = _PARTS["olmo2"]
# families whose converter interleaves the two halves of each head of q and k
_INTERLEAVED = ("llama", "granite", "smollm3", "mistral", "ministral3", "mixtral", "granitemoe")
# families whose converter adds the norm's offset of 1 to the stored weight
_OFFSET = ("gemma2", "gemma3_text")
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_AFTER = re.compile(r"blk\.(\d{1,5})\.")


@dataclass(frozen=True)
class BlockEntry(TensorEntry):
    """A tensor of a GGUF file; ``dtype`` is its format's name.

    ``heads`` is the number of heads whose rows are interleaved, else 0. ``added`` is the number
    that the converter added to each value."""

    heads: int = 0
    added: float = 0.0


def table_of(tensors: Iterable[StoredTensor], config: dict[str, Any]) -> list[BlockEntry]:
    """The tensors of a model by Transformers' names.

    Raises CorruptCheckpoint for an unknown name."""
    family = config["model_type"]
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    names = {**_LAYER, **_PARTS.get(family, {})}
    entries = []
    for tensor in tensors:
        if tensor.name in ROPE_TENSORS or _predicts(tensor.name, config):
            continue
        name, part = _name_of(tensor, names)
        is_norm = name.endswith(("norm.weight", "layernorm.weight"))
        interleaved = heads.get(part, 0) if family in _INTERLEAVED else 0
        added = 1.0 if family in _OFFSET and is_norm else 0.0
        for number, piece in enumerate(_experts(tensor) if "{}" in name else [tensor]):
            # files store the matrix of one row as a vector
            shape = (1, *piece.shape)[-2:] if name.endswith(_ONE_ROW) else piece.shape
            place = shape, piece.start, piece.end, interleaved, added
            entries.append(BlockEntry(tensor.path, name.format(number), tensor.format, *place))
    return entries


def _experts(tensor: StoredTensor) -> list[StoredTensor]:
    """The matrices of a tensor ``[experts, features, columns]``, which are one after another.

    A bias is ``[experts, features]``."""
    dims = 2 if tensor.name.endswith(".bias") else 3
    if len(tensor.shape) != dims:
        raise CorruptCheckpoint(
            f"{tensor.path}: {tensor.name} has shape {list(tensor.shape)}, and experts have "
            f"{dims} dims; download it again"
        )
    size, starts = (tensor.end - tensor.start) // tensor.shape[0], range(tensor.shape[0])
    places = [tensor.start + number * size for number in starts]
    return [replace(tensor, shape=tensor.shape[1:], start=p, end=p + size) for p in places]


def _predicts(name: str, config: dict[str, Any]) -> bool:
    """Whether a tensor belongs to a layer after the last, which predicts further tokens."""
    match = _AFTER.match(name)
    predicting = config["model_type"] in ("glm4_moe", "deepseek_v3")
    return predicting and match is not None and int(match[1]) >= config["num_hidden_layers"]


def _name_of(tensor: StoredTensor, names: dict[str, str]) -> tuple[str, str]:
    """The name of ``tensor`` in Transformers, and its part of a layer."""
    stem, _, kind = tensor.name.rpartition(".")
    if stem in _ENDS and kind in ("weight", "bias"):
        return f"{_ENDS[stem]}.{kind}", ""
    match = _BLOCK.fullmatch(tensor.name)
    if match and match[2] in names:
        # the bias of a choice and sinks have no suffix
        suffix = "" if names[match[2]].endswith(("_bias", ".sinks")) else f".{match[3]}"
        return f"model.layers.{int(match[1])}.{names[match[2]]}{suffix}", match[2]
    raise CorruptCheckpoint(
        f"{tensor.path} holds the tensor {tensor.name[:200]!r}, which a model of its architecture "
        "has no place for"
    )

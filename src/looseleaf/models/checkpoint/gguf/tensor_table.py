"""Names of a file's tensors in Transformers' spelling, and values that converters changed."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
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
_FUSED_UP = {"ffn_up": "mlp.gate_up_proj"}
# names by family where they differ
_NORMS = {
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
}
_NORMS["gemma3_text"] = _NORMS["gemma2"]
_NORMS["exaone4"] = _NORMS["olmo2"]
# families whose converter interleaves the two halves of each head of q and k
_INTERLEAVED = ("llama", "granite", "smollm3", "mistral", "ministral3")
# families whose converter adds the norm's offset of 1 to the stored weight
_OFFSET = ("gemma2", "gemma3_text")
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


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
    names = {**_LAYER, **_NORMS.get(family, {})}
    entries = []
    for tensor in tensors:
        if tensor.name in ROPE_TENSORS:
            continue
        name, part = _name_of(tensor, names)
        is_norm = name.endswith(("norm.weight", "layernorm.weight"))
        entries.append(
            BlockEntry(
                tensor.path,
                name,
                tensor.format,
                tensor.shape,
                tensor.start,
                tensor.end,
                heads.get(part, 0) if family in _INTERLEAVED else 0,
                1.0 if family in _OFFSET and is_norm else 0.0,
            )
        )
    return entries


def _name_of(tensor: StoredTensor, names: dict[str, str]) -> tuple[str, str]:
    """The name of ``tensor`` in Transformers, and its part of a layer."""
    stem, _, kind = tensor.name.rpartition(".")
    if stem in _ENDS and kind in ("weight", "bias"):
        return f"{_ENDS[stem]}.{kind}", ""
    match = _BLOCK.fullmatch(tensor.name)
    if match and match[2] in names:
        return f"model.layers.{int(match[1])}.{names[match[2]]}.{match[3]}", match[2]
    raise CorruptCheckpoint(
        f"{tensor.path} holds the tensor {tensor.name[:200]!r}, which a model of its architecture "
        "has no place for"
    )

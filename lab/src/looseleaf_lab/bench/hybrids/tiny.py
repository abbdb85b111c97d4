"""Tiny random hybrids of Transformers, whose states neither forget at once nor keep everything."""

from typing import Any

import torch

FAMILIES = ("qwen3_next", "qwen3_5_text", "granitemoehybrid", "bamba")
VOCAB_SIZE = 128

_LAYERS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": len(_LAYERS),
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "attn_implementation": "eager",
    # the grouped product has no fp64
    "experts_implementation": "eager",
}
# key and value dims differ, so that a transposed state can't pass
_DELTA = {
    **{"layer_types": _LAYERS, "head_dim": 16},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 12},
}
_EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
}
_MAMBA = {
    **{"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 12, "mamba_n_groups": 2},
    "mamba_chunk_size": 16,
}
_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_DELTA, **_EXPERTS},
    "qwen3_5_text": _DELTA,
    "granitemoehybrid": {
        **_MAMBA,
        **{"layer_types": _LAYERS, "shared_intermediate_size": 32},
        **{"num_local_experts": 4, "num_experts_per_tok": 2},
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [2]},
}


def random_hybrid(family: str, dtype: torch.dtype, seed: int = 0) -> Any:
    """A causal language model of Transformers with four layers, the third with full attention.

    Gates decay by 0.1 to 10 % a token, so that a document's map keeps a part of the state."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **_SHAPE, **_FAMILY[family])
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.zero_()
            elif name.endswith("dt_bias"):
                parameter.copy_(torch.logspace(-3, -1, len(parameter)).expm1().log())
    return model

"""Tiny random checkpoints of every family, written as Hugging Face writes them, with a tokenizer.

Any test tree may use them: ``make_checkpoint(folder, "qwen3", rope_law="yarn")``. Weights are
spread wide enough that every bias, norm and rotation shows in the logits.
"""

import json
from pathlib import Path
from typing import Any

import torch

_FIRST = ("llama", "mistral", "ministral3", "qwen2", "qwen3", "smollm3", "phi", "phi3")
_DENSE = (*_FIRST, "gemma2", "gemma3_text", "glm", "glm4", "granite", "olmo2", "exaone4")
_MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "granitemoe")
EXPERT_FAMILIES = (*_MIXTURES, "gpt_oss")
LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
FAMILIES = (*_DENSE, *EXPERT_FAMILIES, *LATENT_FAMILIES)
ATTENTION_FAMILIES = ("llama", "gemma2", "gemma3_text", "deepseek_v3", "gpt_oss")
"""One family for each kind of attention whose plan differs: plain, windows with capped scores, RoPE
laws by layer, latents, sinks beside windows. The laws of all families are those of
tests/lab/conformance."""
ROPE_LAWS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
MAX_POSITIONS = 256
ORIGINAL_POSITIONS = 32
WINDOW = 7
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>"
    "{{ message['content'] | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKERS = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
VOCAB_SIZE = 320

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "attn_implementation": "eager",
}
_FRACTIONS = {"phi": 0.5, "phi3": 0.75, "glm": 0.5, "glm4": 0.5, "glm4_moe": 0.5}
_LATENT_SHAPE = {
    **{"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20},
    **{"num_key_value_heads": 4, "head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 3},
    **{"moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
}
_FAMILY_SHAPE: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 24},
    "mistral": {"sliding_window": WINDOW, "tie_word_embeddings": True},
    "ministral3": {"head_dim": 24},
    "exaone4": {
        **{"head_dim": 24, "sliding_window": WINDOW},
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "smollm3": {"no_rope_layers": [1, 0, 1], "attention_bias": True},
    "phi": {"num_key_value_heads": 4},
    "phi3": {"sliding_window": WINDOW, "original_max_position_embeddings": ORIGINAL_POSITIONS},
    # caps so low that they bend scores and logits of random weights
    "gemma2": {
        **{"head_dim": 24, "sliding_window": WINDOW, "query_pre_attn_scalar": 10},
        **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5},
    },
    "olmo2": {},
    # without a latent of queries, as V2-Lite
    "deepseek_v2": {**_LATENT_SHAPE, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**_LATENT_SHAPE, "q_lora_rank": 20},
    "glm4_moe_lite": {**_LATENT_SHAPE, "q_lora_rank": 20, "n_group": 1, "topk_group": 1},
    "gemma3_text": {
        **{"head_dim": 24, "sliding_window": WINDOW, "query_pre_attn_scalar": 10},
        **{"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    },
    "glm": {"head_dim": 32},
    "glm4": {"head_dim": 32, "num_key_value_heads": 1},
    "granite": {
        **{"attention_bias": True, "mlp_bias": True},
        **{"embedding_multiplier": 3.0, "residual_multiplier": 0.7},
        **{"attention_multiplier": 0.4, "logits_scaling": 0.25},
    },
    "mixtral": {"num_local_experts": 4, "sliding_window": WINDOW, "head_dim": 24},
    "qwen2_moe": {
        **{"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        **{"shared_expert_intermediate_size": 64, "mlp_only_layers": [0]},
        **{"use_sliding_window": True, "sliding_window": WINDOW},
    },
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "eos_token_id": 1},
    "glm4_moe": {
        **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
        **{"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "head_dim": 32},
        **{"use_qk_norm": True, "attention_bias": True},
    },
    "granitemoe": {
        **{"num_local_experts": 4, "attention_bias": True, "embedding_multiplier": 3.0},
        **{"residual_multiplier": 0.7, "attention_multiplier": 0.4, "logits_scaling": 0.25},
    },
    "qwen3_moe": {
        **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
        **{"head_dim": 32, "mlp_only_layers": [1]},
    },
    # a limit so low that it clips random values
    "gpt_oss": {
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 24, "swiglu_limit": 0.7},
        "sliding_window": WINDOW,
    },
}


def supports(family: str, rope_law: str) -> bool:
    """Whether Transformers lets ``family`` have ``rope_law``: Phi-3 knows LongRoPE only."""
    return family != "phi3" or rope_law in ("default", "longrope")


def make_checkpoint(
    folder: Path, family: str = "llama", rope_law: str = "default", seed: int = 0, **overrides: Any
) -> Path:
    """Writes a tiny random checkpoint with tokenizer; ``overrides`` go to its config."""
    return write_checkpoint(folder, make_model(family, rope_law, seed, **overrides))


def write_checkpoint(folder: Path, model: Any) -> Path:
    """Writes ``model`` and a tokenizer as a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def make_model(family: str, rope_law: str = "default", seed: int = 0, **overrides: Any) -> Any:
    """The Transformers model itself, fp32 and in evaluation mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {**_SHAPE, **_FAMILY_SHAPE[family], **overrides}
    fraction = _FRACTIONS.get(family, 1.0)
    head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    rope = rope_parameters(rope_law, int(head_dim * fraction))
    if fraction != 1.0:
        rope["partial_rotary_factor"] = fraction
    if rope_law == "dynamic":
        shape["max_position_embeddings"] = ORIGINAL_POSITIONS
    if family == "ministral3":
        rope |= {
            "llama_4_scaling_beta": 0.3,
            "original_max_position_embeddings": ORIGINAL_POSITIONS,
        }
    if family == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": 100.0}
        rope = {"full_attention": rope, "sliding_attention": local}
    config = AutoConfig.for_model(family, rope_parameters=rope, **shape)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        spread = 0.3 if name.endswith(("norm.weight", "bias")) else 0.6 * weight.shape[-1] ** -0.5
        if name.endswith("sinks"):
            spread = 2.0
        noise = torch.randn(weight.shape, generator=generator) * spread
        weight.data = noise + 1 if name.endswith("norm.weight") else noise
    for name, value in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            value.copy_(torch.randn(value.shape, generator=generator) * 0.3)
    return model


def rope_parameters(rope_law: str, rotary_dim: int) -> dict[str, Any]:
    """RoPE parameters of ``rope_law`` in the ``rope_parameters`` form of config.json."""
    pairs = range(rotary_dim // 2)
    by_law: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": 3.0},
        "dynamic": {"factor": 2.0},
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL_POSITIONS,
        },
        "yarn": {"factor": 8.0, "original_max_position_embeddings": ORIGINAL_POSITIONS},
        "longrope": {
            "short_factor": [1.0 + 0.05 * i for i in pairs],
            "long_factor": [2.0 + 0.5 * i for i in pairs],
            "original_max_position_embeddings": ORIGINAL_POSITIONS,
        },
    }
    return {"rope_type": rope_law, "rope_theta": 1000.0, **by_law[rope_law]}


def write_tokenizer(folder: Path, **settings: Any) -> None:
    """A byte-level BPE with chat markers, somewhat smaller than the models' ``VOCAB_SIZE``.

    ``settings`` go to its tokenizer_config.json; None leaves a key out.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(MARKERS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["who signs the travel requests of the handbook?"] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    stated = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        **settings,
    }
    kept = {name: value for name, value in stated.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept), encoding="utf-8")

"""Random checkpoints of real shapes, for speed only: a random model's answers are meaningless."""

import json
from pathlib import Path
from typing import Any

import torch

from looseleaf.errors import InvalidOption
from looseleaf.llm.load import reference_model

SHAPES = {
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    },
    "tiny": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 2048,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    },
}


def write_random_checkpoint(shape: str, folder: Path) -> Path:
    """A checkpoint of ``shape`` with random bf16 weights and the reference model's tokenizer.

    Raises InvalidOption for a shape that is not in `SHAPES`.
    """
    from safetensors.torch import save_file

    if shape not in SHAPES:
        raise InvalidOption(f"unknown shape {shape!r}: use one of {', '.join(SHAPES)}")
    config = SHAPES[shape]
    # a GPU draws 8B values in a second; a CPU takes minutes
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    tensors = {
        name: torch.empty(size, dtype=torch.bfloat16, device=device)
        .normal_(0.0, 0.02, generator=generator)
        .cpu()
        for name, size in _tensors(config)
    }
    for name in tensors:
        if name.endswith("norm.weight"):
            tensors[name] = torch.ones_like(tensors[name])
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    reference = reference_model()
    (folder / "tokenizer_config.json").write_bytes(
        (reference / "tokenizer_config.json").read_bytes()
    )
    tokenizer = json.loads((reference / "tokenizer.json").read_text(encoding="utf-8"))
    _fill_vocabulary(tokenizer, int(str(config["vocab_size"])))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


def _fill_vocabulary(tokenizer: dict[str, Any], size: int) -> None:
    """Every id below ``size`` gets a text, since a random model draws any id.

    No merge leads to the additional tokens, so texts keep their ids."""
    vocabulary = tokenizer["model"]["vocab"]
    taken = {*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    for number in range(size):
        if number not in taken:
            # the space of byte-level vocabularies
            vocabulary[f"\u0120word{number}"] = number


def _tensors(config: dict[str, object]) -> list[tuple[str, tuple[int, ...]]]:
    hidden, inner = int(str(config["hidden_size"])), int(str(config["intermediate_size"]))
    heads, kv_heads = (int(str(config[f"num_{k}_heads"])) for k in ("attention", "key_value"))
    kv = hidden // heads * kv_heads
    tensors: list[tuple[str, tuple[int, ...]]] = [
        ("model.embed_tokens.weight", (int(str(config["vocab_size"])), hidden)),
        ("model.norm.weight", (hidden,)),
    ]
    if not config["tie_word_embeddings"]:
        tensors.append(("lm_head.weight", (int(str(config["vocab_size"])), hidden)))
    for layer in range(int(str(config["num_hidden_layers"]))):
        prefix = f"model.layers.{layer}"
        for letter, rows in (("q", hidden), ("k", kv), ("v", kv)):
            tensors.append((f"{prefix}.self_attn.{letter}_proj.weight", (rows, hidden)))
            if config["model_type"] == "qwen2":
                tensors.append((f"{prefix}.self_attn.{letter}_proj.bias", (rows,)))
        tensors.append((f"{prefix}.self_attn.o_proj.weight", (hidden, hidden)))
        tensors.append((f"{prefix}.mlp.gate_proj.weight", (inner, hidden)))
        tensors.append((f"{prefix}.mlp.up_proj.weight", (inner, hidden)))
        tensors.append((f"{prefix}.mlp.down_proj.weight", (hidden, inner)))
        tensors.append((f"{prefix}.input_layernorm.weight", (hidden,)))
        tensors.append((f"{prefix}.post_attention_layernorm.weight", (hidden,)))
    return tensors

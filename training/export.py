"""Writes a trained model as a folder that Transformers and the engine read: weights in bf16.

python -m training.export --weights RUN_FOLDER --tokenizer FOLDER --output FOLDER
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from training.model import ModelConfig
from training.tokenizer import BEGIN, END, PAD

MAX_BYTES = 12_000_000


def model_json(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, object]:
    """The configuration under the names of Hugging Face's Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_qo_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": tokenizer.token_to_id(BEGIN),
        "eos_token_id": tokenizer.token_to_id(END),
        "pad_token_id": tokenizer.token_to_id(PAD),
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def export(config: ModelConfig, weights: Path, tokenizer_folder: Path, output: Path) -> None:
    """Everything of a checkpoint folder; what is too large for the package is refused."""
    output.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    if tokenizer_folder.resolve() != output.resolve():
        shutil.copyfile(tokenizer_folder / "tokenizer.json", output / "tokenizer.json")
    settings = json.loads((tokenizer_folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    _write(output / "tokenizer_config.json", {**settings, "model_max_length": config.max_positions})
    tensors = {
        f"model.{name}": tensor.bfloat16().contiguous()
        for name, tensor in load_file(weights / "model.safetensors").items()
    }
    file = output / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    if file.stat().st_size > MAX_BYTES:
        raise ValueError(
            f"{file} has {file.stat().st_size:,} bytes, the package allows {MAX_BYTES:,}"
        )
    described = model_json(config, tokenizer)
    generation = {key: described[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write(output / "config.json", described)
    _write(output / "generation_config.json", {**generation, "do_sample": False})


def _write(file: Path, content: dict[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    shape = json.loads((arguments.weights / "shape.json").read_text(encoding="utf-8"))
    export(ModelConfig(**shape), arguments.weights, arguments.tokenizer, arguments.output)


if __name__ == "__main__":
    main()

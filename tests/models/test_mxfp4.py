"""GPT-OSS in MXFP4: its values are those of Transformers, and experts stay in 4 bits on a CPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from looseleaf.errors import CorruptCheckpoint
from looseleaf.models import Decoder, load_weights, read_config
from looseleaf.models.quantized import QuantizedWeight
from tests.checkpoints import make_model, write_checkpoint
from tests.models.dense_attend import DenseAttend, sinks_of

LENGTH = 24


def packed(features: int, columns: int, seed: int, count: int = 4) -> tuple[Tensor, Tensor]:
    """Random blocks and scales of ``count`` experts."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (count, features, columns // 32, 16), generator=generator)
    scales = torch.randint(121, 125, (count, features, columns // 32), generator=generator)
    return codes.to(torch.uint8), scales.to(torch.uint8)


def mxfp4_checkpoint(folder: Path, **overrides: Any) -> Any:
    """Writes a checkpoint whose experts are in MXFP4; returns the model with their values."""
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = make_model("gpt_oss", **overrides)
    write_checkpoint(folder, model)
    tensors = load_file(folder / "model.safetensors")
    for index, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, name)
            blocks, scales = packed(*weight.shape[:0:-1], seed=index, count=len(weight))
            # Transformers' own values, [experts, columns, features]
            weight.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            prefix = f"model.layers.{index}.mlp.experts.{name}"
            del tensors[prefix]
            tensors |= {f"{prefix}_blocks": blocks, f"{prefix}_scales": scales}
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(raw))
    return model


def logits_of(folder: Path, tokens: Tensor, **options: Any) -> tuple[Tensor, Decoder]:
    config = read_config(folder).frozen_at(LENGTH)
    decoder = Decoder(config, load_weights(folder, config, torch.float32, **options))
    attend = DenseAttend(config, sinks=sinks_of(decoder))
    attend.positions = torch.arange(len(tokens))
    return decoder.logits(decoder.forward(tokens, attend)), decoder


@pytest.mark.parametrize("options", [{"packed": False}, {"native": False}], ids=str)
def test_logits_of_dequantized_experts_equal_transformers(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    model = mxfp4_checkpoint(tmp_path)
    tokens = torch.arange(LENGTH)
    with torch.inference_mode():
        reference = model(tokens[None]).logits[0]
    logits, _ = logits_of(tmp_path, tokens, **options)
    assert float((logits - reference).abs().max()) <= 1e-4


def test_experts_on_a_cpu_keep_their_4_bits_and_values(tmp_path: Path) -> None:
    model = mxfp4_checkpoint(tmp_path)
    tokens = torch.arange(LENGTH)
    logits, decoder = logits_of(tmp_path, tokens)
    for ours, theirs in zip(decoder.weights.layers, model.model.layers, strict=True):
        gate_up, down = ours.gate_up.weight, ours.down.weight
        assert isinstance(gate_up, QuantizedWeight) and isinstance(down, QuantizedWeight)
        assert gate_up.nbytes + down.nbytes < 0.6 * (gate_up.numel() + down.numel())
        experts = theirs.mlp.experts
        stored = experts.gate_up_proj.transpose(1, 2)
        halves = torch.cat([stored[:, 0::2], stored[:, 1::2]], 1).flatten(0, 1)
        assert torch.equal(gate_up.dequantize(), halves)
        assert torch.equal(down.dequantize(), experts.down_proj.transpose(1, 2).flatten(0, 1))
    # products round activations to 8 bits
    exact, _ = logits_of(tmp_path, tokens, packed=False)
    assert float((logits - exact).abs().max()) <= 0.05 * float(exact.abs().max())


@pytest.mark.parametrize("change", ["missing", "shape", "dtype"])
def test_scales_that_do_not_fit_are_named(tmp_path: Path, change: str) -> None:
    from safetensors.torch import load_file, save_file

    mxfp4_checkpoint(tmp_path)
    path, name = tmp_path / "model.safetensors", "model.layers.1.mlp.experts.down_proj_scales"
    tensors = load_file(path)
    scales = tensors.pop(name)
    if change != "missing":
        tensors[name] = scales[:, 1:].contiguous() if change == "shape" else scales.float()
    save_file(tensors, path)
    with pytest.raises(CorruptCheckpoint, match="down_proj_scales"):
        load_weights(tmp_path, read_config(tmp_path), torch.float32)

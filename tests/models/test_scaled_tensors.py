"""Quantized checkpoints of every form stand for the values that their tools mean."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from looseleaf import LLM
from looseleaf.errors import CorruptCheckpoint, InvalidOption, ModelError, UnsupportedModel
from looseleaf.models import load_weights, read_config
from looseleaf.models.linear import unpack
from tests.models.scaled_files import FORMS, write_scaled

_Q = "model.layers.0.self_attn.q_proj."
_REORDERED = torch.arange(128, dtype=torch.int32) % 2


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replaces tensors of the first query projection, or drops them."""
    tensors = load_file(folder / "model.safetensors")
    for suffix, tensor in changes.items():
        tensors.pop(_Q + suffix)
        if tensor is not None:
            tensors[_Q + suffix] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def settings(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("form", FORMS)
def test_values_are_those_of_the_format(tmp_path: Path, form: str) -> None:
    # a recipe leaves modules out, also one of those that become one matrix
    values = write_scaled(tmp_path, form, left_out="layers.1.self_attn.k_proj")
    weights = load_weights(tmp_path, read_config(tmp_path), torch.float32)
    for number, layer in enumerate(weights.layers):
        for projection, names in (
            (layer.qkv, ("self_attn.q", "self_attn.k", "self_attn.v")),
            (layer.output, ("self_attn.o",)),
            (layer.gate_up, ("mlp.gate", "mlp.up")),
            (layer.down, ("mlp.down",)),
        ):
            expected = torch.cat([values[f"model.layers.{number}.{n}_proj.weight"] for n in names])
            torch.testing.assert_close(unpack(projection.weight), expected)


def test_a_quantized_checkpoint_answers_as_its_values_do(tmp_path: Path) -> None:
    values = write_scaled(tmp_path / "codes", "awq")
    plain = tmp_path / "plain"
    plain.mkdir()
    for file in (tmp_path / "codes").iterdir():
        (plain / file.name).write_bytes(file.read_bytes())
    config = json.loads((plain / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    answers = []
    for folder in (tmp_path / "codes", plain):
        with LLM(folder, device="cpu", dtype="float32") as llm:
            answers.append(llm.generate([[[5, 6, 7, 8]]])[0].outputs[0].token_ids)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("form", "changes", "error", "words"),
    [
        ("awq", {"qzeros": None}, CorruptCheckpoint, "lacks .*qzeros"),
        ("awq", {"qweight": torch.zeros(96, 16, dtype=torch.int32)}, CorruptCheckpoint, "shape"),
        ("gptq", {"qweight": torch.zeros(7, 128, dtype=torch.int32)}, UnsupportedModel, "4 and 8"),
        ("gptq", {"g_idx": _REORDERED},
         UnsupportedModel, "desc_act"),
        ("fp8 by output", {"weight_scale": None}, ModelError, "without scales"),
        ("fp8 by output", {"weight_scale": torch.ones(128, 3)}, UnsupportedModel, "evenly"),
        ("packed", {"weight_scale": None}, CorruptCheckpoint, "lacks .*weight_scale"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path,
    form: str,
    changes: dict[str, torch.Tensor | None],
    error: type[Exception],
    words: str,
) -> None:
    write_scaled(tmp_path, form)
    rewrite(tmp_path, **changes)
    with pytest.raises(error, match=words):
        load_weights(tmp_path, read_config(tmp_path), torch.float32)


@pytest.mark.parametrize(
    ("form", "changes", "field"),
    [
        ("awq", {"quant_method": "bitsandbytes"}, "quant_method"),
        ("awq", {"version": "gemv"}, "version"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format"),
        ("packed", {"format": "nvfp4-pack-quantized"}, "format"),
        ("packed", {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config.format"),
        ("packed", {"quant_method": 7}, "quant_method"),
    ],
)
def test_another_method_or_layout_is_refused_by_its_field(
    tmp_path: Path, form: str, changes: dict[str, object], field: str
) -> None:
    write_scaled(tmp_path, form)
    settings(tmp_path, **changes)
    with pytest.raises(UnsupportedModel, match=rf"quantization_config\.{field}"):
        read_config(tmp_path)


def test_a_cpu_refuses_to_narrow() -> None:
    with pytest.raises(InvalidOption, match="GGUF"):
        LLM(device="cpu", quantize="fp8")

"""Checkpoints whose layers are quantized, written code by code as the formats' tools write them."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import make_checkpoint

Encoded = tuple[dict[str, Tensor], Tensor]
"""Tensors beside a module by suffix, and the values that they stand for."""

AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output of each code of a word."""

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}


def words(codes: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """int32 words of ``codes`` along the last dim, lowest bits first."""
    per = 32 // bits
    order = places or tuple(range(per))
    rows = []
    for row in codes.reshape(-1, codes.shape[-1]).tolist():
        packed = []
        for start in range(0, len(row), per):
            word = sum(int(row[start + place]) << (bits * n) for n, place in enumerate(order))
            packed.append(word - (1 << 32) if word >= 1 << 31 else word)
        rows.append(packed)
    return torch.tensor(rows, dtype=torch.int32)


def fp8(weight: Tensor, scale: Tensor, name: str = "weight_scale") -> Encoded:
    """e4m3 codes under scales by tensor, output or block of 64 x 128."""
    spread = scale
    if (scale.ndim == 2 and scale.shape[1] > 1) or scale.numel() not in (1, len(weight)):
        rows = -(-len(weight) // scale.shape[0])
        columns = weight.shape[1] // scale.shape[1]
        spread = scale.repeat_interleave(rows, 0)[: len(weight)].repeat_interleave(columns, 1)
    elif scale.numel() == len(weight):
        spread = scale.reshape(-1, 1)
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, name: scale}, codes.float() * spread


def by_tensor(weight: Tensor) -> Encoded:
    return fp8(weight, weight.abs().max().reshape(()) / 448)


def by_output(weight: Tensor) -> Encoded:
    return fp8(weight, weight.abs().amax(1, keepdim=True) / 448)


def by_block(weight: Tensor) -> Encoded:
    scale = torch.rand(-(-len(weight) // 128), weight.shape[1] // 128) + 0.01
    return fp8(weight, scale, "weight_scale_inv")


def int8(weight: Tensor) -> Encoded:
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def _drawn(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random codes ``[N, K]``, scales and zeros ``[N, K / group]``, and their values."""
    features, columns = weight.shape
    codes = torch.randint(0, 1 << bits, (features, columns))
    scales = (torch.rand(features, columns // group) * 0.1 + 0.01).half()
    zeros = torch.randint(1, (1 << bits) - 1, scales.shape)
    spread = [x.repeat_interleave(group, 1) for x in (scales.float(), zeros)]
    return codes, scales, zeros, (codes - spread[1]) * spread[0]


def awq(weight: Tensor) -> Encoded:
    codes, scales, zeros, values = _drawn(weight, 4, 128)
    tensors = {
        "qweight": words(codes.t(), 4, AWQ_PLACES),
        "qzeros": words(zeros.t(), 4, AWQ_PLACES),
        "scales": scales.t().contiguous(),
    }
    return tensors, values


def gptq(weight: Tensor, bits: int = 4, offset: int = 1) -> Encoded:
    codes, scales, zeros, values = _drawn(weight, bits, 128)
    tensors = {
        "qweight": words(codes, bits).t().contiguous(),
        "qzeros": words(zeros.t() - offset, bits),
        "scales": scales.t().contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // 128,
    }
    return tensors, values


def packed(weight: Tensor, zero_points: bool = False) -> Encoded:
    codes, scales, zeros, _ = _drawn(weight, 4, 64)
    zeros = zeros if zero_points else torch.full_like(zeros, 8)
    spread = [x.repeat_interleave(64, 1) for x in (scales.float(), zeros)]
    tensors = {
        "weight_packed": words(codes, 4),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if zero_points:
        tensors["weight_zero_point"] = words(zeros.t(), 4).t().contiguous()
    return tensors, (codes - spread[1]) * spread[0]


_COMPRESSED = {"quant_method": "compressed-tensors"}
FORMS: dict[str, tuple[dict[str, object], Callable[[Tensor], Encoded]]] = {
    "fp8 by tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, by_tensor),
    "fp8 by block": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, by_block),
    "fp8 by output": ({**_COMPRESSED, "format": "float-quantized"}, by_output),
    "int8": ({**_COMPRESSED, "format": "int-quantized"}, int8),
    "packed": ({**_COMPRESSED, "format": "pack-quantized"}, packed),
    "packed with zeros": (
        {**_COMPRESSED, "format": "pack-quantized"},
        lambda weight: packed(weight, True),
    ),
    "awq": ({"quant_method": "awq", "version": "gemm", "bits": 4}, awq),
    "gptq": ({"quant_method": "gptq", "bits": 4}, gptq),
    "gptq of 8 bits": ({"quant_method": "gptq", "bits": 8}, lambda w: gptq(w, 8)),
    "gptq v2": (
        {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
        lambda weight: gptq(weight, 4, 0),
    ),
}


def write_scaled(folder: Path, form: str, left_out: str = "") -> dict[str, Tensor]:
    """A checkpoint in ``folder`` in ``form``; the values of all its tensors by name.

    Layers whose name has ``left_out`` stay plain, and all others' projections are quantized."""
    make_checkpoint(folder, "qwen2", use_sliding_window=False, **SHAPE)
    settings, encode = FORMS[form]
    torch.manual_seed(0)
    stored, values = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        skipped = bool(left_out) and left_out in name
        if "_proj.weight" not in name or skipped:
            stored[name] = values[name] = tensor
            continue
        tensors, values[name] = encode(tensor.float())
        module = name.removesuffix("weight")
        stored |= {module + suffix: content.contiguous() for suffix, content in tensors.items()}
        if form == "fp8 by tensor":
            stored[module + "input_scale"] = torch.tensor(1.0)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return values

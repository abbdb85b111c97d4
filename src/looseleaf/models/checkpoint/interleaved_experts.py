"""The experts of GPT-OSS: one tensor for all, gate and up in alternating columns, with biases.

A plain checkpoint stores ``[experts, columns, features]``. MXFP4 stores ``[experts, features,
columns]`` as blocks of 32 codes of 4 bits, each with a power of two as its scale (OCP Microscaling
Formats 1.0).
"""

import torch
from torch import Tensor

from looseleaf.config import ModelConfig
from looseleaf.models.checkpoint.tensor_reader import TensorReader
from looseleaf.models.linear import Projection
from looseleaf.models.quantized import QuantizedWeight
from looseleaf.ops.dense.quantized_linear import BlockMatrix
from looseleaf.ops.dense.scaled_linear import TILE

_BLOCK = 32


def read_interleaved(
    reader: TensorReader, config: ModelConfig, prefix: str
) -> tuple[Projection, Projection]:
    """Gate and up, and down, of all experts, whose tensors begin with ``prefix``."""
    law, hidden = config.experts, config.hidden_size
    assert law is not None, "a layer of experts"
    count, inner = law.num_experts, law.intermediate_size
    projections = []
    for name, features, columns in (
        ("gate_up_proj", 2 * inner, hidden),
        ("down_proj", hidden, inner),
    ):
        weight = _weight(reader, prefix + name, (count, features, columns))
        if isinstance(weight, Tensor) and hidden % TILE == inner % TILE == 0:
            # the kernel takes codes of whole tiles
            weight = reader.narrow(weight)
        wide = isinstance(weight, QuantizedWeight)
        # gate and up alternate
        bias = reader.fused([f"{prefix}{name}_bias"], [(count, features)], wide=wide)
        if name == "gate_up_proj":
            bias = _halves(bias)
        projections.append(Projection(weight, bias.flatten()))
    return projections[0], projections[1]


def _weight(
    reader: TensorReader, name: str, shape: tuple[int, int, int]
) -> Tensor | QuantizedWeight:
    """The matrices of all experts, one below the other, gate before up."""
    count, features, columns = shape
    is_gated = name.endswith("gate_up_proj")
    if f"{name}_blocks" not in reader:
        stored = reader.fused([name], [(count, columns, features)]).transpose(1, 2)
        whole = _halves(stored) if is_gated else stored.contiguous()
        return whole.flatten(0, 1)
    blocks = columns // _BLOCK
    codes = reader.stored_bytes(f"{name}_blocks", (count, features, blocks, _BLOCK // 2))
    scales = reader.stored_bytes(f"{name}_scales", (count, features, blocks))
    if is_gated:
        codes, scales = _halves(codes), _halves(scales)
    return reader.mxfp4(codes.flatten(0, 1).flatten(1), scales.flatten(0, 1))


def _halves(interleaved: Tensor) -> Tensor:
    """``[experts, features, …]`` with the even features before the odd ones."""
    return torch.cat([interleaved[:, 0::2], interleaved[:, 1::2]], 1)


def gguf_blocks(codes: Tensor, scales: Tensor) -> BlockMatrix:
    """Codes ``[features, 16 * blocks]`` and scales ``[features, blocks]`` in GGUF's layout.

    A byte of ``codes`` has two neighbours, the first in its low half. GGUF has values 0 to 15 of a
    block in the low halves, the others in the high ones."""
    first, second = codes.unflatten(-1, (-1, 2, 8)).unbind(-2)
    even, odd = (first & 15) | (second << 4), (first >> 4) | (second & 240)
    packed = torch.stack([even, odd], -1).flatten(-2)
    blocks = torch.cat([scales[..., None], packed], -1)
    return BlockMatrix("MXFP4", blocks.flatten(1))

"""Tensors of a mixture of experts: each family's names, and one matrix of all experts.

The matrices of a layer's experts are one below the other: gate and up of the first expert, then of
the second. Shared experts come last. A wide shared MLP is the sum of experts of the usual size.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from looseleaf.config import ExpertConfig, ModelConfig
from looseleaf.models.checkpoint.interleaved_experts import read_interleaved
from looseleaf.models.checkpoint.tensor_reader import TensorReader
from looseleaf.models.layers import Router
from looseleaf.models.linear import Projection
from looseleaf.models.quantized import QuantizedWeight
from looseleaf.ops.dense.quantized_linear.native import GROUP
from looseleaf.ops.dense.scaled_linear import TILE

_ROUTER_TILE = 64


class ExpertNames(NamedTuple):
    """A family's names below a layer. ``stacked`` tensors have all experts."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    stacked: tuple[()] | tuple[str, str] = ()
    shared: str = "mlp.shared_experts."
    shared_gate: str = "mlp.shared_expert_gate"
    selection_bias: str = "mlp.gate.e_score_correction_bias"


_NAMES = {
    "mixtral": ExpertNames(
        "block_sparse_moe.gate", "block_sparse_moe.experts.", gate="w1", up="w3", down="w2"
    ),
    "gpt_oss": ExpertNames("mlp.router"),
    "qwen2_moe": ExpertNames(shared="mlp.shared_expert."),
    "granitemoe": ExpertNames(
        "block_sparse_moe.router.layer",
        "block_sparse_moe.experts.",
        stacked=("block_sparse_moe.input_linear", "block_sparse_moe.output_linear"),
    ),
}


def read_router(reader: TensorReader, config: ModelConfig, prefix: str) -> Router:
    """The router of the layer ``prefix``."""
    law, names = config.experts, _NAMES.get(config.family, ExpertNames())
    assert law is not None, "a layer of experts"
    hidden = config.hidden_size
    matrices, shapes = [f"{prefix}{names.router}.weight"], [(law.num_experts, hidden)]
    if law.shared_gate:
        matrices.append(f"{prefix}{names.shared_gate}.weight")
        shapes.append((1, hidden))
    per_expert: list[tuple[int, ...]] = [(law.num_experts,)]
    bias = selection_bias = None
    if law.router_bias:
        bias = reader.fused([f"{prefix}{names.router}.bias"], per_expert, wide=True)
    if law.selection_bias:
        selection_bias = reader.fused([prefix + names.selection_bias], per_expert, wide=True)
    weight = reader.router(reader.fused(matrices, [*shapes], wide=True))
    return Router(weight, bias, selection_bias)


def read_experts(
    reader: TensorReader, config: ModelConfig, prefix: str
) -> tuple[Projection, Projection]:
    """Gate and up, and down, of all experts of the layer ``prefix``. Raises UnsupportedModel."""
    law, names = config.experts, _NAMES.get(config.family, ExpertNames())
    assert law is not None, "a layer of experts"
    hidden, inner = config.hidden_size, law.intermediate_size
    if law.expert_bias and prefix + names.experts + "down_proj_bias" in reader:
        return read_interleaved(reader, config, prefix + names.experts)
    stacked = [f"{prefix}{name}.weight" for name in names.stacked]
    # GGUF files store gate and up apart
    if stacked and stacked[0] in reader:
        first, second = stacked
        shapes = (law.num_experts, 2 * inner, hidden), (law.num_experts, hidden, inner)
        gate_up: Tensor | QuantizedWeight = reader.fused([first], [shapes[0]]).flatten(0, 1)
        down: Tensor | QuantizedWeight = reader.fused([second], [shapes[1]]).flatten(0, 1)
    else:
        experts = [f"{prefix}{names.experts}{n}." for n in range(law.num_experts)]
        if law.num_shared == 1:
            experts.append(prefix + names.shared)
        gates = [f"{e}{name}.weight" for e in experts for name in (names.gate, names.up)]
        downs = [f"{e}{names.down}.weight" for e in experts]
        # a wide shared MLP is split by columns, and blocks lie along them
        plain = law.num_shared > 1
        gate_up = _uniform(reader, gates, inner, hidden, plain)
        down = _uniform(reader, downs, hidden, inner, plain)
    if law.num_shared > 1:
        wide = prefix + names.shared, law.num_shared
        gate_up, down = _with_wide_shared(reader, gate_up, down, names, *wide)
    if inner % TILE == hidden % TILE == 0:
        # the kernel takes codes of whole tiles
        gate_up, down = reader.narrow(gate_up), reader.narrow(down)
    projections = Projection(gate_up), Projection(down)
    return _biased(reader, projections, prefix, names, law) if law.expert_bias else projections


def _biased(
    reader: TensorReader,
    projections: tuple[Projection, Projection],
    prefix: str,
    names: ExpertNames,
    law: ExpertConfig,
) -> tuple[Projection, Projection]:
    """``projections`` with the biases of all experts, each in a tensor."""
    experts = [f"{prefix}{names.experts}{n}." for n in range(law.num_experts)]
    parts = (names.gate, names.up), (names.down,)
    biases = []
    for (weight, _), of_matrix in zip(projections, parts, strict=True):
        stored = [f"{expert}{name}.bias" for expert in experts for name in of_matrix]
        shape = (weight.shape[0] // len(stored),)
        # quantized products add their bias in fp32
        wide = isinstance(weight, QuantizedWeight)
        biases.append(reader.fused(stored, [shape] * len(stored), wide=wide))
    first, second = projections
    return first._replace(bias=biases[0]), second._replace(bias=biases[1])


def _uniform(
    reader: TensorReader, names: list[str], features: int, columns: int, plain: bool
) -> Tensor | QuantizedWeight:
    """Matrices of one shape, one below the other, in one format; with ``plain``, their values."""
    weight = reader.expert_matrix(names, features, columns)
    if isinstance(weight, QuantizedWeight) and (plain or len(weight.parts) > 1 or features % GROUP):
        # experts are parts of one matrix in one format, and begin at whole groups
        return reader.fused(names, [(features, columns)] * len(names))
    return weight


def _with_wide_shared(
    reader: TensorReader,
    gate_up: Tensor | QuantizedWeight,
    down: Tensor | QuantizedWeight,
    names: ExpertNames,
    prefix: str,
    count: int,
) -> tuple[Tensor, Tensor]:
    """The experts and a shared MLP that is as wide as ``count`` of them."""
    assert isinstance(gate_up, Tensor) and isinstance(down, Tensor), "plain experts"
    (hidden, inner), stacked = (gate_up.shape[1], down.shape[1]), []
    for name in (names.gate, names.up):
        matrix = reader.fused([f"{prefix}{name}.weight"], [(count * inner, hidden)])
        stacked.append(matrix.unflatten(0, (count, inner)))
    wide = reader.fused([f"{prefix}{names.down}.weight"], [(hidden, count * inner)])
    shared_gate_up = torch.cat(stacked, 1).flatten(0, 1)
    shared_down = wide.unflatten(1, (count, inner)).transpose(0, 1).flatten(0, 1)
    return torch.cat([gate_up, shared_gate_up]), torch.cat([down, shared_down])


def padded_router(weight: Tensor) -> Tensor:
    """``weight`` with rows of zeros up to whole tiles of a product of few rows."""
    missing = -len(weight) % _ROUTER_TILE
    return torch.nn.functional.pad(weight, (0, 0, 0, missing)) if missing else weight

"""A mixture of experts as the MLP of a layer: the router, and the sum over each row's experts.

On a CPU an expert is a gated MLP over the rows that chose it; packed matrices have a C kernel for a
whole layer. On a GPU a kernel computes a product for all experts (`looseleaf.ops.experts.mlp`).
"""

import torch
from torch import Tensor
from torch.nn import functional

from looseleaf.config import ModelConfig
from looseleaf.models.layers import ExpertBranch, LayerWeights, Router, apply_gated
from looseleaf.models.linear import Projection, project
from looseleaf.models.quantized import QuantizedWeight
from looseleaf.ops.dense.quantized_linear import PackedMatrix
from looseleaf.ops.dense.scaled_linear import ScaledMatrix
from looseleaf.ops.dense.split_linear import MAX_ROWS, num_parts, split_linear
from looseleaf.ops.experts.mlp import Activation, ClampedSwiglu, Stacked, expert_mlp
from looseleaf.ops.experts.mlp.mxfp4 import Mxfp4Matrix
from looseleaf.ops.experts.mlp.native import can_sum, expert_mlp_native
from looseleaf.ops.experts.route import Routes, route


def apply_experts(
    normed: Tensor,
    layer: LayerWeights | ExpertBranch,
    config: ModelConfig,
    routed: Tensor | None = None,
) -> Tensor:
    """The sum over each row's experts ``[rows, hidden_size]``, or summands with a leading dim.

    ``routed`` is the input of the router, None for ``normed``."""
    assert layer.router is not None and config.experts is not None, "a layer of experts"
    logits = _logits(normed if routed is None else routed, layer.router)
    routes = route(logits, config.experts, layer.router.selection_bias)
    if isinstance(layer, ExpertBranch):
        scales = layer.scales[routes.experts.long()]
        routes = routes._replace(weights=routes.weights * scales)
    if not normed.is_cuda:
        packed = _packed(layer, config)
        if packed is not None:
            return expert_mlp_native(normed, *packed, routes)
        return _sum_by_expert(normed, layer, routes, config)
    return expert_mlp(
        normed,
        _stacked(layer.gate_up),
        _stacked(layer.down),
        routes,
        activation=_activation(config),
        gate_up_bias=layer.gate_up.bias,
        down_bias=layer.down.bias,
    )


def _activation(config: ModelConfig) -> Activation:
    if config.activation == "swigluoai":
        return ClampedSwiglu(config.swiglu_alpha, config.swiglu_limit)
    return config.activation


def _packed(
    layer: LayerWeights | ExpertBranch, config: ModelConfig
) -> tuple[PackedMatrix, PackedMatrix] | None:
    """The matrices of all experts for the C kernel, None if it does not serve them."""
    assert config.experts is not None, "a layer of experts"
    (gate_up, bias), (down, down_bias) = layer.gate_up, layer.down
    if isinstance(gate_up, Tensor) or isinstance(down, Tensor):
        return None
    first, second = gate_up.parts[0], down.parts[0]
    packed = isinstance(first, PackedMatrix) and isinstance(second, PackedMatrix)
    if not packed or config.activation != "silu" or bias is not None or down_bias is not None:
        return None
    assert isinstance(first, PackedMatrix) and isinstance(second, PackedMatrix)
    return (first, second) if can_sum(first, second, config.experts.num_stored) else None


def _stacked(projection: Projection) -> Stacked:
    """The matrices of all experts for the kernel."""
    weight = projection.weight
    if isinstance(weight, Tensor):
        return weight
    (part,) = weight.parts
    assert isinstance(part, ScaledMatrix | Mxfp4Matrix), "a GPU has codes with scales"
    return part


def _logits(normed: Tensor, router: Router) -> Tensor:
    """The router's fp32 logits ``[rows, logits]``, or parts of them: rounding changes choices."""
    weight = router.weight
    if not normed.is_cuda:
        logits = functional.linear(normed.float(), weight)
    elif normed.itemsize == 4:
        logits = functional.linear(normed, weight)
    else:
        num_sms = torch.cuda.get_device_properties(normed.device).multi_processor_count
        parts = num_parts(normed, weight, num_sms) if len(normed) <= MAX_ROWS else 0
        if parts and router.bias is None:
            return split_linear(normed, weight, parts)
        logits = torch.mm(normed, weight.t(), out_dtype=torch.float32)
    # a GPU's weight has further rows of zeros
    return logits if router.bias is None else logits[:, : len(router.bias)] + router.bias


def _sum_by_expert(
    normed: Tensor, layer: LayerWeights | ExpertBranch, routes: Routes, config: ModelConfig
) -> Tensor:
    """One gated MLP for each expert that a row chose."""
    assert config.experts is not None, "a layer of experts"
    count, total = config.experts.num_stored, torch.zeros_like(normed, dtype=torch.float32)
    for expert in routes.experts.unique().tolist():
        rows, slots = (routes.experts == expert).nonzero(as_tuple=True)
        inner = apply_gated(normed[rows], expert_of(layer.gate_up, expert, count), config)
        product = project(inner, expert_of(layer.down, expert, count))
        total.index_add_(0, rows, product.float() * routes.weights[rows, slots, None])
    return total.to(normed.dtype)


def expert_of(stacked: Projection, expert: int, count: int) -> Projection:
    """The projection of one of ``count`` experts, whose matrices are one below the other."""
    weight, bias = stacked
    features = weight.shape[0] // count
    rows = slice(expert * features, (expert + 1) * features)
    own = weight.part(rows) if isinstance(weight, QuantizedWeight) else weight[rows]
    return Projection(own, None if bias is None else bias[rows])

"""Tensors of Gemma 4's further branches: inputs of layers, and experts beside the MLP."""

from torch import Tensor

from looseleaf.config import ModelConfig
from looseleaf.models.checkpoint.tensor_reader import TensorReader
from looseleaf.models.layers import ExpertBranch, InputWeights, LayerInputWeights, Router
from looseleaf.models.linear import Projection
from looseleaf.models.quantized import QuantizedWeight
from looseleaf.ops.dense.scaled_linear import TILE


def read_inputs(reader: TensorReader, config: ModelConfig) -> InputWeights | None:
    """The tables of all layers' inputs; None for a model without them."""
    shape = config.layer_inputs
    if shape is None:
        return None
    size = config.num_layers * shape.dim
    return InputWeights(
        reader.matrix(["model.embed_tokens_per_layer.weight"], [shape.vocab_size], size),
        reader.projection(
            ["model.per_layer_model_projection"], [size], config.hidden_size, bias=False
        ),
        reader.norm("model.per_layer_projection_norm", shape.dim, config),
    )


def read_layer_inputs(
    reader: TensorReader, config: ModelConfig, prefix: str
) -> LayerInputWeights | None:
    """The products of the inputs of the layer ``prefix``; None for a model without them."""
    shape, hidden = config.layer_inputs, config.hidden_size
    if shape is None:
        return None
    return LayerInputWeights(
        reader.projection([prefix + "per_layer_input_gate"], [shape.dim], hidden, bias=False),
        reader.projection([prefix + "per_layer_projection"], [hidden], shape.dim, bias=False),
        reader.norm(prefix + "post_per_layer_input_norm", hidden, config),
    )


def read_branch(reader: TensorReader, config: ModelConfig, prefix: str) -> ExpertBranch | None:
    """The experts beside the MLP of the layer ``prefix``; None for a model without them."""
    law, hidden = config.experts, config.hidden_size
    if law is None or not law.beside_mlp:
        return None
    count, inner = law.num_experts, law.intermediate_size
    shapes = {"gate_up_proj": (count, 2 * inner, hidden), "down_proj": (count, hidden, inner)}
    stacked: list[Projection] = []
    for name, shape in shapes.items():
        weight: Tensor | QuantizedWeight = reader.fused([f"{prefix}experts.{name}"], [shape])
        assert isinstance(weight, Tensor), "tensors of all experts are plain"
        weight = weight.flatten(0, 1)
        if hidden % TILE == inner % TILE == 0:
            # the kernel takes codes of whole tiles
            weight = reader.narrow(weight)
        stacked.append(Projection(weight))
    per_expert, per_dim = [(count,)], [(hidden,)]
    router = reader.fused([prefix + "router.proj.weight"], [(count, hidden)], wide=True)
    scale = reader.fused([prefix + "router.scale"], [*per_dim], wide=True)
    return ExpertBranch(
        Router(reader.router(router * (scale * hidden**-0.5))),
        gate_up=stacked[0],
        down=stacked[1],
        input_norm=reader.norm(prefix + "pre_feedforward_layernorm_2", hidden, config),
        output_norm=reader.norm(prefix + "post_feedforward_layernorm_2", hidden, config),
        dense_norm=reader.norm(prefix + "post_feedforward_layernorm_1", hidden, config),
        scales=reader.fused([prefix + "router.per_expert_scale"], [*per_expert], wide=True),
    )

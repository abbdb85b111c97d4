"""The two pieces a decoder layer is made of besides attention: the norm and the MLP.

As functions over plain tensors, with as few operations as the mathematics allows: at batch 1 on a
CPU the count of operations is the speed.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from looseleaf.config import ModelConfig
from looseleaf.models.linear import Projection


class Norm(NamedTuple):
    """Weight and, for layer norm, bias ``[features]``."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class LayerWeights:
    """One layer. ``qkv`` and ``gate_up`` are fused; without a gate the latter is the up projection.

    A norm is a ``Projection`` by name only: weight and bias ``[hidden_size]``. ``mlp_norm`` is None
    where attention and MLP read the same normed input.
    """

    input_norm: Norm
    qkv: Projection
    output: Projection
    mlp_norm: Norm | None
    gate_up: Projection
    down: Projection
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True)
class DecoderWeights:
    """All tensors of a decoder, on one device, in one dtype; a tied head shares the embedding."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    lm_head: Projection


def apply_norm(hidden: Tensor, norm: Norm, config: ModelConfig) -> Tensor:
    """RMS norm or layer norm over the last dim, as ``config.norm`` says."""
    if config.norm == "rms":
        return functional.rms_norm(hidden, norm.weight.shape, norm.weight, config.norm_eps)
    return functional.layer_norm(hidden, norm.weight.shape, norm.weight, norm.bias, config.norm_eps)


def apply_activation(hidden: Tensor, config: ModelConfig) -> Tensor:
    """The MLP's inner values ``[rows, intermediate_size]`` from the fused gate and up."""
    if not config.gated_mlp:
        return _nonlinearity(hidden, config.activation)
    gate, up = hidden.chunk(2, -1)
    return _nonlinearity(gate, config.activation).mul_(up)


def _nonlinearity(hidden: Tensor, name: str) -> Tensor:
    if name == "silu":
        return functional.silu(hidden)
    return functional.gelu(hidden, approximate="tanh" if name == "gelu_new" else "none")

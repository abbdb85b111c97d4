"""The pieces a decoder layer is made of besides attention: the residual stream, the norm, the MLP.

As functions over plain tensors, with as few operations as the mathematics allows: at batch 1 the
count of operations is the speed, on a CPU and on a GPU. Where the two differ is in what an addition
to the stream is fused with: the product before it, or, for few rows on a GPU, the norm behind it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from looseleaf.config import ModelConfig
from looseleaf.models.linear import Projection, add_project, add_project_, project
from looseleaf.ops.gated_linear import gated_linear, serves
from looseleaf.ops.rms_norm import rms_norm
from looseleaf.ops.silu_mul import silu_mul
from looseleaf.ops.split_linear import num_parts, serves_whole, split_linear, whole_linear

# on a GPU the product of more rows hides the traffic of the stream that it is added to; that of
# fewer rows is best cut along its inner dim, and adds up what it was cut into on its own
_FEW_ROWS = 512


class Norm(NamedTuple):
    """Weight and, for layer norm, bias ``[features]``."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class LayerWeights:
    """One layer. ``qkv`` and ``gate_up`` are fused; without a gate the latter is the up projection.

    ``mlp_norm`` is None where attention and MLP read the same normed input.
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


class Stream(NamedTuple):
    """The residual stream ``[rows, hidden_size]``: ``total``, and what is still to be added, which
    may be in parts ``[parts, rows, hidden_size]``."""

    total: Tensor
    pending: Tensor | None = None

    def settled(self) -> Tensor:
        """The stream with everything in it."""
        if self.pending is None:
            return self.total
        added = self.pending if self.pending.ndim == 2 else self.pending.sum(0)
        return self.total + added.to(self.total.dtype)


def add_projected(stream: Stream, hidden: Tensor, projection: Projection) -> Stream:
    """The stream with ``hidden @ weight.T + bias`` added, now or by the next norm.

    May change the stream in place: what was given is not to be used again.
    """
    if stream.total.is_cuda and len(hidden) <= _FEW_ROWS:
        return Stream(stream.settled(), _summands(hidden, projection))
    if stream.total.is_cuda:
        return Stream(add_project_(stream.settled(), hidden, projection))
    return Stream(add_project(stream.settled(), hidden, projection))


def _summands(hidden: Tensor, projection: Projection) -> Tensor:
    """``hidden @ weight.T + bias``, in parts where that is faster."""
    weight, bias = projection
    properties = torch.cuda.get_device_properties(hidden.device)
    parts = num_parts(hidden, weight, properties.multi_processor_count) if bias is None else 0
    return split_linear(hidden, weight, parts) if parts else project(hidden, projection)


def project_heads(normed: Tensor, qkv: Projection) -> Tensor:
    """Queries, keys and values ``[rows, features]`` of an attention layer's normed input."""
    if qkv.bias is None and serves_whole(normed, qkv.weight):
        return whole_linear(normed, qkv.weight)
    return project(normed, qkv)


def apply_norm(stream: Stream, norm: Norm, config: ModelConfig) -> tuple[Tensor, Stream]:
    """RMS norm or layer norm of the stream, as ``config.norm`` says, and the stream settled.

    May settle it in place: what was given is not to be used again.
    """
    if config.norm == "rms" and stream.total.is_cuda:
        normed, total = rms_norm(stream.total, norm.weight, config.norm_eps, stream.pending)
        return normed, Stream(total)
    total, shape = stream.settled(), norm.weight.shape
    if config.norm == "rms":
        return functional.rms_norm(total, shape, norm.weight, config.norm_eps), Stream(total)
    normed = functional.layer_norm(total, shape, norm.weight, norm.bias, config.norm_eps)
    return normed, Stream(total)


def apply_gated(normed: Tensor, gate_up: Projection, config: ModelConfig) -> Tensor:
    """The MLP's inner values ``[rows, intermediate_size]`` from its normed input."""
    fused = config.gated_mlp and config.activation == "silu" and gate_up.bias is None
    if fused and serves(normed, gate_up.weight):
        return gated_linear(normed, gate_up.weight)
    return apply_activation(project(normed, gate_up), config)


def apply_activation(hidden: Tensor, config: ModelConfig) -> Tensor:
    """The MLP's inner values ``[rows, intermediate_size]`` from the fused gate and up."""
    if not config.gated_mlp:
        return _nonlinearity(hidden, config.activation)
    if hidden.is_cuda and config.activation == "silu":
        return silu_mul(hidden)
    gate, up = hidden.chunk(2, -1)
    return _nonlinearity(gate, config.activation).mul_(up)


def _nonlinearity(hidden: Tensor, name: str) -> Tensor:
    if name == "silu":
        return functional.silu(hidden)
    return functional.gelu(hidden, approximate="tanh" if name == "gelu_new" else "none")

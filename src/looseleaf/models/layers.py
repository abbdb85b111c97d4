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
from looseleaf.ops.dense.gated_linear import gated_linear, serves
from looseleaf.ops.dense.rms_norm import rms_norm
from looseleaf.ops.dense.silu_mul import silu_mul
from looseleaf.ops.dense.split_linear import num_parts, serves_whole, split_linear, whole_linear

# on a GPU the product of more rows hides the traffic of the stream that it is added to; that of
# fewer rows is best cut along its inner dim, and adds up what it was cut into on its own
_FEW_ROWS = 512


class Norm(NamedTuple):
    """Weight and, for layer norm, bias ``[features]``. The weight is fp32 in a narrower model, too,
    where it has an offset in it."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class LayerWeights:
    """One layer. ``qkv`` and ``gate_up`` are fused; without a gate the latter is the up projection.

    ``input_norm`` and ``mlp_norm`` are None where the stream is read as it is, the latter also
    where attention and MLP read the same normed input. ``output_norm`` and ``down_norm`` are those
    of what attention and MLP add to the stream, None where it is added as it is. ``q_norm`` and
    ``k_norm`` weigh the dims of a head, or of all heads.
    """

    input_norm: Norm | None
    qkv: Projection
    output: Projection
    mlp_norm: Norm | None
    gate_up: Projection
    down: Projection
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    output_norm: Norm | None = None
    down_norm: Norm | None = None


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
        return self.total + _whole(self.pending, self.total.dtype)


def add_projected(stream: Stream, hidden: Tensor, projection: Projection) -> Stream:
    """The stream with ``hidden @ weight.T + bias`` added, now or by the next norm.

    May change the stream in place: what was given is not to be used again.
    """
    if stream.total.is_cuda and len(hidden) <= _FEW_ROWS:
        return Stream(stream.settled(), _summands(hidden, projection))
    if stream.total.is_cuda:
        return Stream(add_project_(stream.settled(), hidden, projection))
    return Stream(add_project(stream.settled(), hidden, projection))


def add_branch(
    stream: Stream, hidden: Tensor, projection: Projection, norm: Norm | None, config: ModelConfig
) -> Stream:
    """As `add_projected`, after a norm of the product's own, if there is one, and times the model's
    multiplier."""
    few = hidden.is_cuda and len(hidden) <= _FEW_ROWS
    branch = _summands(hidden, projection) if few else project(hidden, projection)
    if norm is not None:
        # the norm is one of the whole branch, so parts can't wait for the stream's next one
        branch = _normed(_whole(branch, hidden.dtype), norm, config)
    if config.residual_multiplier != 1.0:
        branch = branch * config.residual_multiplier
    return Stream(stream.settled(), branch)


def _whole(summands: Tensor, dtype: torch.dtype) -> Tensor:
    """What may be in parts as one ``[rows, features]``."""
    return (summands if summands.ndim == 2 else summands.sum(0)).to(dtype)


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


def apply_norm(stream: Stream, norm: Norm | None, config: ModelConfig) -> tuple[Tensor, Stream]:
    """RMS norm or layer norm of the stream, as ``config.norm`` says, or the stream itself without a
    norm; and the stream settled.

    May settle it in place: what was given is not to be used again.
    """
    if norm is None:
        total = stream.settled()
        return total, Stream(total)
    if config.norm == "rms" and stream.total.is_cuda:
        normed, total = rms_norm(stream.total, norm.weight, config.norm_eps, stream.pending)
        return normed, Stream(total)
    total, weight = stream.settled(), norm.weight
    if config.norm == "rms" and not config.norm_offset:
        # a small model on a CPU notices each call
        return functional.rms_norm(total, weight.shape, weight, config.norm_eps), Stream(total)
    return _normed(total, norm, config), Stream(total)


def _normed(hidden: Tensor, norm: Norm, config: ModelConfig) -> Tensor:
    """The norm of ``hidden`` alone, which stays as it is."""
    if config.norm == "rms" and hidden.is_cuda:
        return rms_norm(hidden, norm.weight, config.norm_eps).normed
    shape = norm.weight.shape
    if config.norm_offset:
        # PyTorch's own has no fast path for a weight of another dtype, and warns of it
        wide = hidden.to(norm.weight.dtype)
        return functional.rms_norm(wide, shape, norm.weight, config.norm_eps).to(hidden.dtype)
    if config.norm == "rms":
        return functional.rms_norm(hidden, shape, norm.weight, config.norm_eps)
    return functional.layer_norm(hidden, shape, norm.weight, norm.bias, config.norm_eps)


def norm_heads(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The RMS norm of the last dim of queries or keys; a wider ``weight`` in its own dtype."""
    return torch.rms_norm(heads.to(weight.dtype), weight.shape, weight, eps).to(heads.dtype)


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

"""A decoder layer's parts besides attention: the residual stream, norms and the MLP.

They are functions over tensors with as few operations as possible: at batch 1 the number of
operations decides the speed. An addition to the stream fuses with the product before it. For few
rows on a GPU it fuses with the norm after it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from looseleaf.config import ModelConfig
from looseleaf.models.linear import Projection, add_project, add_project_, project
from looseleaf.models.quantized import QuantizedWeight
from looseleaf.ops.dense.gated_linear import gated_linear, serves
from looseleaf.ops.dense.rms_norm import rms_norm
from looseleaf.ops.dense.rms_norm.native import rms_norm_native
from looseleaf.ops.dense.silu_mul import silu_mul
from looseleaf.ops.dense.split_linear import num_parts, serves_whole, split_linear, whole_linear
from looseleaf.parallel import Ranks

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_new": partial(functional.gelu, approximate="tanh"),
    }
)
# above this number of rows a GPU's product hides the traffic of the stream; below, a product that
# is split along its inner dim is faster
_FEW_ROWS = 512


class Norm(NamedTuple):
    """Weight and, for layer norm, bias ``[features]``. A weight with an offset is always fp32.

    ``native`` is whether the C kernel computes an RMS norm."""

    weight: Tensor
    bias: Tensor | None = None
    native: bool = False


class Router(NamedTuple):
    """The router of a layer of experts: ``weight [logits, hidden_size]`` and biases in fp32.

    The weight has a row per expert, then one of the shared experts' gate if there is one. On a GPU
    rows of zeros follow."""

    weight: Tensor
    bias: Tensor | None = None
    selection_bias: Tensor | None = None


@dataclass(frozen=True)
class LatentWeights:
    """One layer's maps between latents and heads (MLA).

    ``query_up`` and its norm are None if the fused projection gives the queries themselves.
    ``key_up`` is ``[heads, nope_dim, rank]``, ``value_up`` ``[heads, rank, value_dim]``."""

    latent_norm: Norm
    key_up: Tensor
    value_up: Tensor
    query_norm: Norm | None = None
    query_up: Projection | None = None


@dataclass(frozen=True)
class ExpertBranch:
    """Experts beside the dense MLP of a layer (Gemma 4).

    Both read the stream, each after a norm of its own, and each branch has a norm after it:
    ``dense_norm`` and ``output_norm``. The router reads the stream over its root mean square.
    ``scales`` (fp32) multiply the weights of chosen experts."""

    router: Router
    gate_up: Projection
    down: Projection
    input_norm: Norm
    output_norm: Norm
    dense_norm: Norm
    scales: Tensor


@dataclass(frozen=True)
class LayerInputWeights:
    """A layer's products of its further inputs: a gate of the stream, its projection and norm."""

    gate: Projection
    projection: Projection
    norm: Norm


@dataclass(frozen=True)
class LayerWeights:
    """One layer. ``qkv`` and ``gate_up`` are fused; without a gate the latter is the up projection.
    With a ``router``, ``gate_up`` and ``down`` have the matrices of all experts, one below the
    other.

    ``input_norm`` and ``mlp_norm`` are None without a norm before attention or MLP. ``mlp_norm`` is
    also None if both read the same normed input. ``output_norm`` and ``down_norm`` follow attention
    and MLP; None means no norm there. ``q_norm`` and ``k_norm`` are ``[head_dim]`` or
    ``[heads * head_dim]``. ``sinks`` are fp32 logits ``[num_qo_heads]`` (`ScoreRule.sinks`). With
    ``latent`` maps, ``qkv`` has the latents in place of heads. ``qkv`` has no values if the keys'
    projection gives them, and only queries in a layer that stores nothing. ``branch`` are experts
    beside the MLP. ``scalar`` multiplies the stream after the layer.
    """

    input_norm: Norm | None
    qkv: Projection
    output: Projection
    mlp_norm: Norm | None
    gate_up: Projection
    down: Projection
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    output_norm: Norm | None = None
    down_norm: Norm | None = None
    router: Router | None = None
    sinks: Tensor | None = None
    latent: LatentWeights | None = None
    branch: ExpertBranch | None = None
    inputs: LayerInputWeights | None = None
    scalar: float = 1.0


@dataclass(frozen=True)
class InputWeights:
    """The tables of all layers' further inputs: an embedding ``[vocab, layers * dim]``, and the
    projection of a token's embedding with its norm over ``dim``."""

    embedding: Tensor | QuantizedWeight
    projection: Projection
    norm: Norm


@dataclass(frozen=True)
class DecoderWeights:
    """All tensors of a decoder, on one device, in one dtype; a tied head shares the embedding.

    With ``ranks`` they are this rank's slices: of heads, columns of the MLP, and the vocabulary."""

    embedding: Tensor | QuantizedWeight
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    lm_head: Projection
    ranks: Ranks | None = None
    inputs: InputWeights | None = None


class Stream(NamedTuple):
    """The residual stream ``[rows, hidden_size]``: ``total`` and a pending addition, which may be
    split as ``[parts, rows, hidden_size]``."""

    total: Tensor
    pending: Tensor | None = None

    def settled(self) -> Tensor:
        """The stream with its pending addition."""
        if self.pending is None:
            return self.total
        return self.total + _whole(self.pending, self.total.dtype)


def add_projected(
    stream: Stream, hidden: Tensor, projection: Projection, ranks: Ranks | None = None
) -> Stream:
    """The stream plus ``hidden @ weight.T + bias``, summed over ``ranks``; may be left pending.

    May change ``stream`` in place: do not use it again.
    """
    total = stream.total if stream.pending is None else stream.settled()
    if ranks is not None:
        return Stream(total, ranks.sum(_branch(hidden, projection)))
    if not total.is_cuda:
        return Stream(add_project(total, hidden, projection))
    if len(hidden) <= _FEW_ROWS:
        return Stream(total, _summands(hidden, projection))
    return Stream(add_project_(total, hidden, projection))


def add_branch(
    stream: Stream,
    hidden: Tensor,
    projection: Projection,
    norm: Norm | None,
    config: ModelConfig,
    ranks: Ranks | None = None,
) -> Stream:
    """As `add_projected`, with the product normed by ``norm`` and times the model's multiplier."""
    if ranks is not None:
        branch = ranks.sum(_branch(hidden, projection))
    elif hidden.is_cuda and len(hidden) <= _FEW_ROWS:
        branch = _summands(hidden, projection)
    else:
        branch = project(hidden, projection)
    return add_summands(stream, branch, norm, config)


def add_summands(stream: Stream, branch: Tensor, norm: Norm | None, config: ModelConfig) -> Stream:
    """The stream plus ``branch``, which may have a leading dim of parts, left pending.

    The sum of the parts is normed by ``norm`` and times the model's multiplier."""
    if norm is not None:
        # the norm needs the sum of the parts
        branch = _normed(_whole(branch, stream.total.dtype), norm, config)
    if config.residual_multiplier != 1.0:
        branch = branch * config.residual_multiplier
    return Stream(stream.settled(), branch)


def _branch(hidden: Tensor, projection: Projection) -> Tensor:
    """``hidden @ weight.T + bias`` as one tensor, by the fastest product."""
    if hidden.is_cuda and len(hidden) <= _FEW_ROWS:
        return _whole(_summands(hidden, projection), hidden.dtype)
    return project(hidden, projection)


def _whole(summands: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum ``[rows, features]`` of a product that may be split into parts."""
    return (summands if summands.ndim == 2 else summands.sum(0)).to(dtype)


def _summands(hidden: Tensor, projection: Projection) -> Tensor:
    """``hidden @ weight.T + bias``, split into parts if that is faster."""
    weight, bias = projection
    properties = torch.cuda.get_device_properties(hidden.device)
    if bias is not None:
        return project(hidden, projection)
    if isinstance(weight, QuantizedWeight):
        return weight.summands(hidden)
    parts = num_parts(hidden, weight, properties.multi_processor_count)
    return split_linear(hidden, weight, parts) if parts else project(hidden, projection)


def project_heads(normed: Tensor, qkv: Projection) -> Tensor:
    """Queries, keys and values ``[rows, features]`` of an attention layer's normed input."""
    weight, bias = qkv
    if isinstance(weight, QuantizedWeight) or bias is not None:
        return project(normed, qkv)
    if serves_whole(normed, weight):
        return whole_linear(normed, weight)
    return project(normed, qkv)


def apply_norm(stream: Stream, norm: Norm | None, config: ModelConfig) -> tuple[Tensor, Stream]:
    """The stream after ``config.norm`` (without ``norm`` unchanged), and the settled stream.

    May change ``stream`` in place: do not use it again.
    """
    if norm is not None and config.norm == "rms" and stream.total.is_cuda:
        normed, total = rms_norm(stream.total, norm.weight, config.norm_eps, stream.pending)
        return normed, Stream(total)
    if stream.pending is not None:
        stream = Stream(stream.settled())
    if norm is None:
        return stream.total, stream
    if norm.native:
        return rms_norm_native(stream.total, norm.weight, config.norm_eps), stream
    if config.norm == "rms" and not config.norm_offset:
        # calls are a large share of a small model's time on a CPU
        weight = norm.weight
        return functional.rms_norm(stream.total, weight.shape, weight, config.norm_eps), stream
    return _normed(stream.total, norm, config), stream


def _normed(hidden: Tensor, norm: Norm, config: ModelConfig) -> Tensor:
    """The norm of ``hidden``, which stays unchanged."""
    if config.norm == "rms" and hidden.is_cuda:
        return rms_norm(hidden, norm.weight, config.norm_eps).normed
    if norm.native:
        return rms_norm_native(hidden, norm.weight, config.norm_eps)
    shape = norm.weight.shape
    if config.norm_offset:
        # PyTorch warns if the dtypes of input and weight differ
        wide = hidden.to(norm.weight.dtype)
        return functional.rms_norm(wide, shape, norm.weight, config.norm_eps).to(hidden.dtype)
    if config.norm == "rms":
        return functional.rms_norm(hidden, shape, norm.weight, config.norm_eps)
    return functional.layer_norm(hidden, shape, norm.weight, norm.bias, config.norm_eps)


def norm_heads(heads: Tensor, norm: Norm, eps: float) -> Tensor:
    """The RMS norm over the last dim of queries or keys, computed in the dtype of its weight."""
    weight = norm.weight
    if norm.native:
        return rms_norm_native(heads, weight, eps)
    return torch.rms_norm(heads.to(weight.dtype), weight.shape, weight, eps).to(heads.dtype)


def norm_plain(values: Tensor, eps: float) -> Tensor:
    """``values`` over the root mean square of their last dim."""
    return torch.rms_norm(values.float(), values.shape[-1:], None, eps).to(values.dtype)


def apply_gated(normed: Tensor, gate_up: Projection, config: ModelConfig) -> Tensor:
    """The MLP's inner values ``[rows, intermediate_size]`` from its normed input."""
    fuses = config.gated_mlp and config.activation == "silu"
    weight = gate_up.weight
    if fuses and gate_up.bias is None:
        if isinstance(weight, QuantizedWeight):
            if weight.can_gate:
                return weight.gate(normed)
        elif normed.is_cuda and serves(normed, weight):
            return gated_linear(normed, weight)
    hidden = project(normed, gate_up)
    if fuses and normed.is_cuda:
        return silu_mul(hidden)
    if config.activation == "swigluoai":
        return swigluoai(hidden, config.swiglu_alpha, config.swiglu_limit)
    activate = _ACTIVATIONS[config.activation]
    if not config.gated_mlp:
        return activate(hidden)
    gate, up = hidden.chunk(2, -1)
    return activate(gate).mul_(up)


def activation_of(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """The activation of the MLP."""
    return _ACTIVATIONS[config.activation]


def swigluoai(hidden: Tensor, alpha: float, limit: float) -> Tensor:
    """The clamped SwiGLU of ``hidden`` ``[rows, gate and up]`` (see `ModelConfig`)."""
    gate, up = hidden.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(gate * alpha)).mul_(up + 1)

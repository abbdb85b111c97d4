"""A decoder's layers by few calls: one for the products between two attentions, or one for all
layers with their attention.

Only for quantized weights on a CPU with C kernels, and layers that add their branches to the stream
without a norm or a multiplier.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from looseleaf.config import ModelConfig
from looseleaf.models.layers import DecoderWeights, LayerWeights, Norm
from looseleaf.models.linear import Projection
from looseleaf.models.quantized import QuantizedWeight
from looseleaf.ops.dense.product_chain import ProductChain, Stage
from looseleaf.ops.dense.quantized_linear import PackedMatrix
from looseleaf.types import NativeAttend

MAX_ROWS = 32
"""Most rows of a chain: with more, Python's share of a step is small."""

SplitHeads = Callable[[Tensor], tuple[Tensor, Tensor | None, Tensor | None]]
# numbers of buffers
_STREAM, _ATTENDED, _OUT, _HEADS, _INNER = range(5)


class _Range(NamedTuple):
    """Stages of a layer: its heads, its branches, and the end of the next layer's heads."""

    heads: int
    branches: int
    stop: int
    next_stop: int


class _Memory(NamedTuple):
    """Buffers of a layer that its successor overwrites."""

    heads: Tensor
    attended: Tensor
    inner: Tensor


class LayerChain:
    """The stages of all layers of a decoder."""

    def __init__(self, chain: ProductChain, ranges: list[_Range], widths: tuple[int, ...]) -> None:
        self._chain, self._ranges, self._widths = chain, ranges, widths
        stops = [*(each.next_stop for each in ranges[:-1]), ranges[-1].stop]
        starts = [each.branches for each in ranges]
        self._stages = list(zip(starts, stops, strict=True))
        # by the number of rows
        self._memory: dict[int, _Memory] = {}

    @classmethod
    def create(cls, config: ModelConfig, weights: DecoderWeights) -> "LayerChain | None":
        """The chain of ``weights``, None if their layers or formats do not allow one."""
        gated = config.gated_mlp and config.activation == "silu" and config.norm == "rms"
        branches = config.post_norms or config.parallel_residual or not config.pre_norms
        plain = config.residual_multiplier == 1.0 and config.latent is None
        if not gated or branches or not plain:
            return None
        stages: list[Stage] = []
        ends: list[tuple[int, int, int]] = []
        for layer in weights.layers:
            heads, rest = _head_stages(layer), _branch_stages(layer)
            if not heads or not rest:
                return None
            first = len(stages)
            stages += heads + rest
            ends.append((first, first + len(heads), len(stages)))
        # the last layer has no next one
        stops = [next_heads for _, next_heads, _ in ends[1:]] + [len(stages)]
        ranges = [_Range(*end, stop) for end, stop in zip(ends, stops, strict=True)]
        qkv, attended = stages[0], weights.layers[0].output.weight.shape[1]
        features = sum(stage.width for stage in stages[: ends[0][1]])
        hidden = qkv.matrix.columns
        widths = (hidden, attended, hidden, features, config.intermediate_size)
        return cls(ProductChain(stages, widths, config.norm_eps), ranges, widths)

    def heads(self, layer: int, stream: Tensor) -> Tensor:
        """Queries, keys and values ``[rows, features]`` of the stream before ``layer``."""
        heads = self._empty(_HEADS, stream)
        first, stop = self._ranges[layer][:2]
        self._chain.run(first, stop, (None, None, stream, heads, None))
        return heads

    def branches(
        self, layer: int, stream: Tensor, attended: Tensor, next_heads: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The stream after ``layer``; with ``next_heads`` also the heads of the next layer."""
        out, inner = self._empty(_OUT, stream), self._empty(_INNER, stream)
        heads = self._empty(_HEADS, stream) if next_heads else None
        _, first, stop, next_stop = self._ranges[layer]
        buffers = (stream, attended, out, heads, inner)
        self._chain.run(first, next_stop if next_heads else stop, buffers)
        return out, heads

    def run(self, stream: Tensor, attend: NativeAttend, split: SplitHeads) -> Tensor | None:
        """The stream after the last layer, by one call for all layers.

        ``split`` has queries, keys and values of a layer's fused heads. None if ``attend`` has work
        outside of C."""
        memory = self._memory_of(stream)
        q, k, v = split(memory.heads)
        assert k is not None and v is not None, "every layer of a chain stores keys"
        calls = attend.calls(q, k, v, memory.attended.view(q.shape))
        if calls is None:
            return None
        first, stop = self._ranges[0][:2]
        self._chain.run(first, stop, (None, None, stream, memory.heads, None))
        outputs = self._empty(_OUT, stream), self._empty(_OUT, stream)
        buffers = (stream, memory.attended, outputs[0], memory.heads, memory.inner)
        turns = _STREAM, _OUT, outputs[1]
        attend.require(self._chain.run_layers(calls, self._stages, buffers, turns))
        return outputs[(len(self._ranges) - 1) % 2]

    def _memory_of(self, stream: Tensor) -> "_Memory":
        """Buffers for the rows of ``stream``, whose addresses stay."""
        rows = len(stream)
        if rows not in self._memory:
            sizes = (_HEADS, _ATTENDED, _INNER)
            self._memory[rows] = _Memory(*(self._empty(buffer, stream) for buffer in sizes))
        return self._memory[rows]

    def _empty(self, buffer: int, like: Tensor) -> Tensor:
        return torch.empty(like.shape[0], self._widths[buffer], dtype=like.dtype)


def _head_stages(layer: LayerWeights) -> list[Stage]:
    """The products of queries, keys and values; empty if the layer has none of this kind."""
    weight = _native_weight(layer.qkv, layer.input_norm)
    if weight is None or layer.input_norm is None:
        return []
    stages, column, bias = [], 0, layer.qkv.bias
    for part in weight.parts:
        assert isinstance(part, PackedMatrix), "see _native_weight"
        added = None if bias is None else bias[column : column + part.features]
        stages.append(
            Stage(part, _OUT, _HEADS, norm=layer.input_norm.weight, bias=added, column=column)
        )
        column += part.features
    return stages


def _branch_stages(layer: LayerWeights) -> list[Stage]:
    """Attention's projection and the MLP; empty if the layer has none of this kind."""
    norm = layer.mlp_norm
    if layer.router is not None:
        return []
    output, down = _native_weight(layer.output), _native_weight(layer.down)
    gate_up = _native_weight(layer.gate_up, norm)
    if norm is None or output is None or down is None or gate_up is None:
        return []
    single = all(len(weight.parts) == 1 for weight in (output, down))
    if not single or not gate_up.can_gate or layer.gate_up.bias is not None:
        return []
    first, gate, last = (weight.parts[0] for weight in (output, gate_up, down))
    assert isinstance(first, PackedMatrix) and isinstance(gate, PackedMatrix)
    assert isinstance(last, PackedMatrix), "see _native_weight"
    return [
        Stage(first, _ATTENDED, _OUT, _STREAM, bias=layer.output.bias),
        Stage(gate, _OUT, _INNER, norm=norm.weight, gated=True),
        Stage(last, _INNER, _OUT, _OUT, bias=layer.down.bias),
    ]


def _native_weight(projection: Projection, norm: Norm | None = None) -> QuantizedWeight | None:
    """The weight of a projection whose parts are packed, after a norm in C if there is one."""
    weight = projection.weight
    if not isinstance(weight, QuantizedWeight) or (norm is not None and not norm.native):
        return None
    return weight if all(isinstance(part, PackedMatrix) for part in weight.parts) else None

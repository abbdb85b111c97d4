"""Further inputs of each layer: a token's own embedding for that layer (Gemma 3n, Gemma 4).

The inputs of all layers are computed before the first one. After a layer, a gate of the stream
times the layer's input is projected, normed and added to the stream.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.config import ModelConfig
from looseleaf.models.layers import (
    InputWeights,
    LayerInputWeights,
    Stream,
    activation_of,
    add_summands,
    norm_heads,
)
from looseleaf.models.linear import look_up, project


def layer_inputs(
    tokens: Int[Tensor, " rows"],
    embedded: Float[Tensor, "rows hidden_size"],
    weights: InputWeights,
    config: ModelConfig,
) -> Float[Tensor, "rows layers_dims"]:
    """The inputs of all layers, one after the other, for ``tokens`` and their embeddings."""
    shape = config.layer_inputs
    assert shape is not None, "a model with inputs of layers"
    own = look_up(weights.embedding, tokens) * float(
        torch.tensor(shape.dim**0.5, dtype=embedded.dtype)
    )
    projected = project(embedded, weights.projection) * config.hidden_size**-0.5
    normed = norm_heads(
        projected.view(len(tokens), -1, shape.dim), weights.norm, config.norm_eps
    ).flatten(1)
    scaled: Tensor = (normed + own) * 2.0**-0.5
    return scaled


def add_inputs(
    stream: Stream,
    inputs: Float[Tensor, "rows layers_dims"],
    weights: LayerInputWeights | None,
    layer: int,
    config: ModelConfig,
) -> Stream:
    """The stream plus the branch of ``layer`` for its part of ``inputs``."""
    assert weights is not None and config.layer_inputs is not None, "a layer with inputs"
    dim, hidden = config.layer_inputs.dim, stream.settled()
    own = inputs[:, layer * dim : (layer + 1) * dim]
    gate = activation_of(config)(project(hidden, weights.gate))
    branch = project(gate * own, weights.projection)
    return add_summands(Stream(hidden), branch, weights.norm, config)

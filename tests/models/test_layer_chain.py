"""A layer's products in one call are bit for bit those of single calls."""

from dataclasses import replace

import pytest
import torch

from looseleaf.config import ModelConfig
from looseleaf.errors import InvalidOption
from looseleaf.models import Decoder
from looseleaf.models.layer_chain import MAX_ROWS, LayerChain
from looseleaf.models.layers import DecoderWeights, Norm
from looseleaf.models.linear import Projection
from looseleaf.models.quantized import QuantizedWeight
from looseleaf.ops.dense.product_chain import ProductChain, Stage
from looseleaf.ops.dense.quantized_linear import PackedMatrix
from looseleaf_lab.bench.model_shapes import model_shape
from looseleaf_lab.bench.random_model import random_weights
from looseleaf_lab.testing.poison import poisoned
from looseleaf_lab.testing.quantized import normal_blocks
from tests.models.dense_attend import DenseAttend

SHAPE = replace(model_shape("tiny"), hidden_size=256, num_qo_heads=16)


def mixed_weights(dtype: torch.dtype) -> DecoderWeights:
    """Values in another format than queries and keys, biases, norms of each layer."""
    weights = random_weights(SHAPE, dtype, torch.device("cpu"), "Q8_0")
    layers = []
    for n, layer in enumerate(weights.layers):
        names = (("Q4_K", 256), ("Q4_K", 32), ("Q6_K", 32))
        parts = [normal_blocks(name, rows, 256, seed=n) for name, rows in names]
        qkv = Projection(QuantizedWeight.create(parts, dtype), torch.randn(320))
        norm = Norm(torch.rand(256).to(dtype) + 0.5, native=True)
        layers.append(replace(layer, qkv=qkv, input_norm=norm))
    return replace(weights, layers=tuple(layers))


def hidden_states(
    config: ModelConfig, weights: DecoderWeights, rows: int, *, chained: bool, last: bool
) -> torch.Tensor:
    decoder, attend = Decoder(config, weights), DenseAttend(config)
    tokens = torch.arange(rows) * 7 % config.vocab_size
    attend.positions = torch.arange(rows)
    asked = torch.tensor([rows - 1]) if last else None
    attend.asked = asked
    with poisoned():
        if chained:
            return decoder.forward(tokens, attend, last_rows=asked)
        # a hook that changes nothing keeps layers apart
        return decoder.forward(tokens, attend, lambda _, stream: stream, asked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("last", [False, True])
def test_a_chain_equals_single_products(dtype: torch.dtype, rows: int, last: bool) -> None:
    weights = mixed_weights(dtype)
    assert LayerChain.create(SHAPE, weights) is not None
    chained, single = (
        hidden_states(SHAPE, weights, rows, chained=chained, last=last) for chained in (True, False)
    )
    assert torch.equal(chained, single)


def test_many_rows_take_single_products() -> None:
    weights = mixed_weights(torch.float32)
    chained, single = (
        hidden_states(SHAPE, weights, MAX_ROWS + 1, chained=chained, last=False)
        for chained in (True, False)
    )
    assert torch.equal(chained, single)


def test_layers_of_another_kind_have_no_chain() -> None:
    weights = random_weights(SHAPE, torch.float32, torch.device("cpu"), "Q8_0")
    assert LayerChain.create(SHAPE, weights) is not None
    for changes in ({"residual_multiplier": 0.5}, {"post_norms": True}, {"activation": "gelu"}):
        assert LayerChain.create(replace(SHAPE, **changes), weights) is None
    plain = random_weights(SHAPE, torch.float32, torch.device("cpu"))
    assert LayerChain.create(SHAPE, plain) is None
    torch_norm = replace(weights.layers[0], input_norm=Norm(torch.ones(256)))
    assert LayerChain.create(SHAPE, replace(weights, layers=(torch_norm,))) is None


def test_stages_and_buffers_that_do_not_fit_are_refused() -> None:
    blocks = normal_blocks("Q8_0", 64, 32)
    matrix = PackedMatrix(blocks.blocks, blocks.layout, torch.float32)
    for stage, widths in (
        (Stage(matrix, 0, 1), (32, 63)),
        (Stage(matrix, 0, 1), (64, 64)),
        (Stage(matrix, 0, 0), (32, 32)),
        (Stage(matrix, 0, 1, column=1), (32, 64)),
        (Stage(matrix, 0, 1, residual=0), (32, 64)),
        (Stage(matrix, 0, 1, norm=torch.ones(33)), (32, 64)),
        (Stage(matrix, 0, 1, bias=torch.ones(64).half()), (32, 64)),
    ):
        with pytest.raises(InvalidOption, match="does not fit"):
            ProductChain([stage], widths, 1e-5)
    chain = ProductChain([Stage(matrix, 0, 1)], (32, 64), 1e-5)
    for buffers in (
        (torch.zeros(2, 32), torch.zeros(3, 64)),
        (torch.zeros(2, 32), torch.zeros(2, 64).half()),
        (torch.zeros(32, 2).T, torch.zeros(2, 64)),
        (torch.zeros(2, 33), torch.zeros(2, 64)),
    ):
        with pytest.raises(InvalidOption, match="needs rows"):
            chain.run(0, 1, buffers)

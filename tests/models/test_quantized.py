"""A decoder of quantized weights computes with their values, up to 8 bits of its activations."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from looseleaf.errors import NativeUnavailable
from looseleaf.models import Decoder
from looseleaf.models.layers import DecoderWeights, LayerWeights, apply_gated
from looseleaf.models.linear import Projection, add_project, look_up, project, unpack
from looseleaf.models.quantized import QuantizedWeight
from looseleaf.ops.dense.quantized_linear import BlockMatrix, PackedMatrix
from looseleaf_lab.bench.model_shapes import model_shape
from looseleaf_lab.bench.random_model import random_weights
from looseleaf_lab.testing.quantized import normal_blocks, random_blocks
from tests.models.dense_attend import DenseAttend

SHAPE = replace(model_shape("tiny"), hidden_size=256, intermediate_size=512, num_qo_heads=16)
TOKENS = torch.randint(0, 512, (24,), generator=torch.Generator().manual_seed(1))


class Rounded(QuantizedWeight):
    """Rounds activations as the C kernels do, and multiplies in fp32."""

    can_gate = False

    def multiply(
        self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        chunks = x.unflatten(1, (-1, 32))
        steps = chunks.abs().amax(-1, keepdim=True) / 127
        rounded = ((chunks / steps).nan_to_num().round() * steps).flatten(1)
        product = functional.linear(rounded, self.dequantize(), bias)
        return product if residual is None else product + residual


def replaced(
    weights: DecoderWeights, change: Callable[[QuantizedWeight], Tensor | QuantizedWeight]
) -> DecoderWeights:
    """``weights`` with another form of each matrix."""

    def changed(projection: Projection) -> Projection:
        assert isinstance(projection.weight, QuantizedWeight)
        return Projection(change(projection.weight), projection.bias)

    def layer(weights: LayerWeights) -> LayerWeights:
        names = ("qkv", "output", "gate_up", "down")
        return replace(weights, **{name: changed(getattr(weights, name)) for name in names})

    head = changed(weights.lm_head)
    layers = tuple(map(layer, weights.layers))
    return replace(weights, embedding=head.weight, layers=layers, lm_head=head)


def logits(weights: DecoderWeights) -> Tensor:
    decoder, attend = Decoder(SHAPE, weights), DenseAttend(SHAPE)
    attend.positions = torch.arange(len(TOKENS))
    return decoder.logits(decoder.forward(TOKENS, attend))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q4_K", "Q6_K"])
def test_logits_differ_by_the_rounding_of_activations(name: str) -> None:
    quantized = random_weights(SHAPE, torch.float32, torch.device("cpu"), name)
    actual = logits(quantized)
    exact = logits(replaced(quantized, lambda weight: weight.dequantize()))
    rounded = logits(replaced(quantized, lambda weight: Rounded(weight.parts, weight.dtype)))
    # sums differ in the last bit, and some activations then round to the other code
    errors = [(each - exact).square().mean().sqrt() for each in (actual, rounded)]
    assert errors[0] <= 1.25 * errors[1]
    assert errors[1] <= 0.03 * exact.square().mean().sqrt()


@pytest.mark.parametrize("name", ["BF16", "F16"])
def test_sixteen_bit_weights_round_nothing(name: str) -> None:
    weights = random_weights(SHAPE, torch.float32, torch.device("cpu"), name)
    exact = logits(replaced(weights, lambda weight: weight.dequantize()))
    torch.testing.assert_close(logits(weights), exact, rtol=1e-4, atol=1e-4)


def test_parts_of_several_formats_are_one_matrix() -> None:
    names = ("Q4_K", "Q4_K", "Q6_K")
    parts = [random_blocks(name, 40, 256, seed=n) for n, name in enumerate(names)]
    weight = QuantizedWeight.create(parts, torch.float32)
    assert [part.features for part in weight.parts] == [80, 40]
    assert weight.shape == (120, 256)
    values = torch.cat([part.dequantize() for part in parts])
    assert torch.equal(unpack(weight), values)
    x, bias, residual = torch.randn(3, 256), torch.randn(120), torch.randn(3, 120)
    plain = QuantizedWeight.create(parts, torch.float32, native=False)
    assert all(isinstance(part, BlockMatrix) for part in plain.parts)
    exact = functional.linear(x, values, bias)
    torch.testing.assert_close(project(x, Projection(plain, bias)), exact)
    torch.testing.assert_close(add_project(residual, x, Projection(plain, bias)), exact + residual)
    product = project(x, Projection(weight, bias))
    assert (product - exact).abs().max() <= 0.02 * exact.abs().max()
    added = add_project(residual, x, Projection(weight, bias))
    torch.testing.assert_close(added, product + residual)


def test_planes_of_several_formats_are_one_matrix() -> None:
    names = ("Q4_K", "Q4_K", "Q6_K")
    parts = [normal_blocks(name, 64, 256, seed=n) for n, name in enumerate(names)]
    weight = QuantizedWeight.in_planes(parts, torch.float32, torch.device("cpu"))
    assert [part.features for part in weight.parts] == [128, 64]
    assert weight.shape == (192, 256) and not weight.can_gate
    assert weight.nbytes <= 1.03 * sum(part.nbytes for part in parts)
    values = torch.cat([part.dequantize() for part in parts])
    assert torch.equal(unpack(weight), values)
    x, bias, residual = torch.randn(3, 256), torch.randn(192), torch.randn(3, 192)
    exact = functional.linear(x, values)
    torch.testing.assert_close(project(x, Projection(weight, bias)), exact + bias)
    torch.testing.assert_close(
        add_project(residual.clone(), x, Projection(weight)), exact + residual
    )
    torch.testing.assert_close(weight.summands(x), exact)


def test_rows_of_an_embedding_are_dequantized() -> None:
    matrix, tokens = normal_blocks("Q5_0", 64, 192), torch.tensor([63, 0, 3, 3])
    for form in ("packed", "blocks", "planes"):
        if form == "planes":
            weight = QuantizedWeight.in_planes([matrix], torch.bfloat16, torch.device("cpu"))
        else:
            native = form == "packed"
            weight = QuantizedWeight.create([matrix], torch.bfloat16, native=native)
        expected = matrix.dequantize()[tokens].bfloat16()
        assert torch.equal(look_up(weight, tokens), expected)


@pytest.mark.parametrize("inner", [64, 48])
def test_a_gate_of_any_size_is_silu_times_up(inner: int) -> None:
    parts = [normal_blocks("Q8_0", inner, 256, seed=n) for n in range(2)]
    gate_up = QuantizedWeight.create(parts, torch.float32)
    assert gate_up.can_gate == (inner == 64)
    x = torch.randn(4, 256)
    gate, up = project(x, Projection(gate_up)).chunk(2, 1)
    expected = functional.silu(gate) * up
    torch.testing.assert_close(apply_gated(x, Projection(gate_up), SHAPE), expected)


def test_without_a_compiler_products_are_right_and_a_warning_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> PackedMatrix:
        raise NativeUnavailable("no C compiler")

    monkeypatch.setattr("looseleaf.models.quantized.PackedMatrix", refuse)
    matrix = normal_blocks("Q4_0", 40, 64)
    weight = QuantizedWeight.create([matrix], torch.float32)
    assert "no C compiler" in caplog.text
    monkeypatch.undo()
    x = torch.randn(2, 64)
    torch.testing.assert_close(weight.multiply(x), functional.linear(x, matrix.dequantize()))

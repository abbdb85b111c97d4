"""Products with codes of few bits equal those with the dequantized matrix."""

import pytest
import torch

from looseleaf.errors import InvalidOption
from looseleaf.ops.dense.scaled_linear import (
    Codes,
    ScaledMatrix,
    dequantize,
    fits,
    pack_pairs,
    quantize,
    scaled_linear,
    stack,
)
from looseleaf_lab.testing.budget import assert_within_budget
from looseleaf_lab.testing.poison import poisoned

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the interpreter multiplies bf16 wrongly: only a GPU can try it
DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]
KINDS: list[Codes] = ["fp8", "int8", "int4"]


def drawn(kind: Codes, features: int = 128, columns: int = 512, groups: int = 1) -> ScaledMatrix:
    """A matrix of random codes, with scales of several sizes and zeros for 4 bits."""
    scales = torch.rand(features, groups) + 0.01
    if kind == "int4":
        codes = pack_pairs(torch.randint(0, 16, (features, columns)))
        matrix = ScaledMatrix(kind, codes, scales, torch.randint(0, 16, scales.shape).float())
    elif kind == "int8":
        codes = torch.randint(-127, 128, (features, columns), dtype=torch.int8)
        matrix = ScaledMatrix(kind, codes, scales)
    else:
        codes = torch.randn(features, columns).mul(20).to(torch.float8_e4m3fn)
        matrix = ScaledMatrix(kind, codes, scales)
    return matrix.to(torch.device(DEVICE))


def test_pairs_keep_the_order_of_columns() -> None:
    codes = torch.randint(0, 16, (3, 256))
    matrix = ScaledMatrix("int4", pack_pairs(codes), torch.ones(3, 1))
    assert torch.equal(dequantize(matrix, torch.float32), codes.float())
    with pytest.raises(InvalidOption, match="tiles of 128"):
        pack_pairs(codes[:, :100])


def test_a_group_has_its_scale_and_zero() -> None:
    codes = torch.arange(256).remainder(16)[None]
    scales, zeros = torch.tensor([[2.0, 0.5]]), torch.tensor([[3.0, 8.0]])
    matrix = ScaledMatrix("int4", pack_pairs(codes), scales, zeros)
    values = dequantize(matrix, torch.float32)[0]
    assert values[5] == (5 - 3) * 2.0
    assert values[128 + 7] == (7 - 8) * 0.5


@pytest.mark.parametrize(("kind", "bound"), [("fp8", 1 / 16), ("int8", 1 / 254), ("int4", 1 / 15)])
def test_quantized_values_are_nearest(kind: Codes, bound: float) -> None:
    weight = torch.randn(64, 256) * torch.rand(64, 1)
    error = (dequantize(quantize(weight, kind), torch.float32) - weight).abs()
    largest = weight.abs().amax(1, keepdim=True)
    if kind == "fp8":
        # e4m3 has three bits after the leading one, and steps of 1/512 of its smallest numbers
        assert (error <= weight.abs() * bound + largest / 448 / 512).all()
    else:
        span = largest if kind == "int8" else weight.amax(1, keepdim=True) - weight.amin(1, True)
        assert (error <= span * bound * 1.01).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "groups"), [(1, 1), (1, 4), (2, 2), (4, 4), (16, 4), (33, 2), (5, 1)]
)
def test_the_kernel_is_within_the_budget(
    dtype: torch.dtype, kind: Codes, rows: int, groups: int
) -> None:
    matrix = drawn(kind, groups=groups)
    assert fits(matrix)
    wide = torch.randn(rows, 600).to(DEVICE, dtype)
    x = wide[:, :512]
    with poisoned():
        product = scaled_linear(x, matrix, "triton")
    weight = dequantize(matrix, torch.float64)
    plain = scaled_linear(x, matrix, "reference")
    assert_within_budget(product, x.double() @ weight.T, plain, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_are_within_the_budget_of_their_roundings(kind: Codes) -> None:
    """Weights are rounded to 16 bits, and rows to FP8 where the library multiplies it."""
    matrix = drawn(kind, features=64, columns=256)
    x = torch.randn(200, 256).to(DEVICE, torch.bfloat16 if DEVICE == "cuda" else torch.float16)
    product = scaled_linear(x, matrix, "triton")
    truth = x.double() @ dequantize(matrix, torch.float64).T
    error = (product.double() - truth).norm() / truth.norm()
    assert error < (0.04 if kind == "fp8" and DEVICE == "cuda" else 0.01)


def test_stacked_matrices_keep_their_scales() -> None:
    parts = [drawn("int4", features=64, groups=2) for _ in range(2)]
    assert parts[0].same_form(parts[1]) and not parts[0].same_form(drawn("int8"))
    whole = dequantize(stack(parts), torch.float32)
    assert torch.equal(whole, torch.cat([dequantize(part, torch.float32) for part in parts]))

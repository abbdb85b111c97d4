"""Laws of quantized products: GGUF's values, and errors within the rounding of the activations."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from looseleaf.errors import CorruptCheckpoint, InvalidOption, NativeUnavailable, UnsupportedModel
from looseleaf.ops.dense.quantized_linear import (
    FORMATS,
    BlockMatrix,
    PackedMatrix,
    quantized_linear,
)
from looseleaf.ops.dense.quantized_linear.native import GROUP, supported_instructions
from looseleaf_lab.testing.poison import poisoned
from looseleaf_lab.testing.quantized import random_blocks

EVERY_FORMAT = pytest.mark.parametrize("name", FORMATS)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def packed(matrix: BlockMatrix, dtype: torch.dtype = torch.float32) -> PackedMatrix:
    return PackedMatrix(matrix.blocks, matrix.layout, dtype)


def product(matrix: PackedMatrix, x: Tensor) -> Tensor:
    with poisoned():
        return matrix.multiply(x, torch.empty(len(x), matrix.features, dtype=x.dtype))


def round_to_codes(x: Tensor) -> Tensor:
    """``x`` in 8 bits per 32 values, each within half a step of a 127th of the largest."""
    chunks = x.unflatten(1, (-1, 32))
    most = chunks.abs().amax(-1, keepdim=True)
    inverse = torch.where(most >= 2.0**-100, 127 / most, 0.0)
    rounded = ((chunks * inverse).round().double() * (most / 127)).flatten(1)
    steps = (most.double() / 127).expand_as(chunks).flatten(1)
    assert ((rounded - x.double()).abs() <= 0.501 * steps + 2.0**-100).all()
    return rounded


def sum_rounding(matrix: BlockMatrix, x: Tensor) -> Tensor:
    """A bound of the rounding of fp32 sums over chunks, where codes and mins may cancel."""
    values = matrix.dequantize().double().abs().unflatten(1, (-1, 32))
    largest = values.amax(-1, keepdim=True).expand_as(values).flatten(1)
    chunk = x.double().abs().unflatten(1, (-1, 32)).amax(-1, keepdim=True)
    return 2**-23 * 64 * chunk.expand(-1, -1, 32).flatten(1) @ largest.T + 2.0**-126


@EVERY_FORMAT
def test_values_are_those_of_the_gguf_package(name: str) -> None:
    matrix = random_blocks(name, 5, 512, seed=1)
    oracle = gguf.quants.dequantize(matrix.blocks.numpy(), gguf.GGMLQuantizationType[name])
    assert np.array_equal(matrix.dequantize().numpy(), oracle)


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_rows_are_the_values_rounded_once(name: str, dtype: torch.dtype) -> None:
    matrix = random_blocks(name, GROUP + 3, 768, seed=2)
    numbers = torch.tensor([GROUP + 2, 0, 7, 7])
    with poisoned():
        rows = packed(matrix, dtype).rows(numbers)
    assert torch.equal(rows, matrix.dequantize()[numbers].to(dtype))


@EVERY_FORMAT
def test_instruction_sets_agree_bit_for_bit(name: str) -> None:
    matrix = random_blocks(name, 2 * GROUP + 5, 512, seed=3)
    x = torch.randn(11, 512, generator=torch.Generator().manual_seed(0))
    products = [
        product(PackedMatrix(matrix.blocks, matrix.layout, x.dtype, instructions), x)
        for instructions in supported_instructions()
    ]
    assert all(torch.equal(products[0], other) for other in products)


@pytest.mark.parametrize("byte", [0, 127, 128, 255])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
@EVERY_FORMAT
def test_the_largest_codes_overflow_no_sum(name: str, byte: int, sign: float) -> None:
    layout = FORMATS[name]
    blocks = torch.full((GROUP, 2 * layout.block_bytes), byte, dtype=torch.uint8)
    # a float16 of 0.00195 at every place where a format may have a scale
    half = torch.tensor([0, 24], dtype=torch.uint8)
    for start in range(0, 2 * layout.block_bytes, layout.block_bytes):
        for place in (208,) if name == "Q6_K" else (0, 2) if layout.has_min else (0,):
            blocks[:, start + place : start + place + 2] = half
        if name == "MXFP4":
            blocks[:, start], blocks[:, start + 1] = 119, byte
    if layout.bits == 16:
        blocks.view(torch.int16).fill_(0x1800)
    x = torch.full((1, 2 * layout.block), sign)
    for instructions in supported_instructions():
        matrix = PackedMatrix(blocks, layout, x.dtype, instructions)
        exact = x.double() @ BlockMatrix(name, blocks).dequantize().double().T
        torch.testing.assert_close(product(matrix, x).double(), exact, rtol=1e-4, atol=1e-3)


@settings(max_examples=60)
@given(
    name=st.sampled_from(list(FORMATS)),
    rows=st.integers(0, 19),
    features=st.integers(1, 70),
    blocks=st.integers(1, 3),
    size=st.sampled_from([1e-38, 1e-6, 1.0, 1e6, 1e30]),
    scale=st.sampled_from([0.0, 6e-8, 1e-3, 8.0]),
    empty=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_products_are_those_of_activations_in_eight_bits(
    name: str, rows: int, features: int, blocks: int, size: float, scale: float, empty: bool,
    seed: int,
) -> None:  # fmt: skip
    columns = blocks * FORMATS[name].block
    matrix = random_blocks(name, features, columns, seed=seed, scale=scale)
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(rows, columns + 5, generator=generator) * size
    x = wide[:, :columns]
    x[:, 3] *= 50
    if empty:
        x[:, -32:] = 0
    activations = x.double() if FORMATS[name].bits == 16 else round_to_codes(x)
    exact = activations @ matrix.dequantize().double().T
    error = (product(packed(matrix), x).double() - exact).abs()
    assert (error <= sum_rounding(matrix, x)).all()


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_half_precision_adds_one_rounding(dtype: torch.dtype) -> None:
    matrix = random_blocks("Q4_K", 40, 512, seed=4)
    x = torch.randn(3, 512).to(dtype)
    wide = product(packed(matrix), x.float())
    assert torch.equal(product(packed(matrix, dtype), x), wide.to(dtype))


def test_bfloat16_rows_by_bfloat16_values_round_the_sum_only() -> None:
    """Products of two numbers of 8 bits are exact in fp32; each sum rounds."""
    matrix = random_blocks("BF16", GROUP + 5, 96, seed=11)
    x = torch.randn(14, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    values = matrix.dequantize().double()
    exact, most = x.double() @ values.T, x.double().abs() @ values.abs().T
    budget = 96 * 2.0**-24 * most + exact.abs() * 2.0**-8
    for instructions in supported_instructions():
        packed = PackedMatrix(matrix.blocks, matrix.layout, x.dtype, instructions)
        whole = product(packed, x)
        assert ((whole.double() - exact).abs() <= budget).all(), instructions
        assert torch.equal(product(packed, x[12:13]), whole[12:13])


@EVERY_FORMAT
def test_a_row_is_the_same_in_every_batch_and_number_of_threads(name: str) -> None:
    matrix = packed(random_blocks(name, 300, 512, seed=5))
    x = torch.randn(261, 512)
    whole, threads = product(matrix, x), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(product(matrix, x), whole)
    finally:
        torch.set_num_threads(threads)
    for rows in (slice(0, 1), slice(3, 8), slice(255, 261)):
        assert torch.equal(product(matrix, x[rows]), whole[rows])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_reaches_its_row_only(value: float) -> None:
    matrix = packed(random_blocks("Q5_K", 33, 256, seed=6))
    x = torch.randn(4, 256)
    clean = product(matrix, x)
    x[2, 100] = value
    marked = product(matrix, x)
    assert marked[2].isnan().all()
    finite = [0, 1, 3]
    assert torch.equal(marked[finite], clean[finite])


def test_sums_with_bias_and_residual_are_rounded_once() -> None:
    matrix = random_blocks("Q8_0", 45, 64, seed=7)
    x, wide, bias = torch.randn(5, 64).bfloat16(), torch.randn(5, 60).bfloat16(), torch.randn(45)
    residual = wide[:, :45]
    with poisoned():
        out = torch.empty(5, 90, dtype=torch.bfloat16)
        packed(matrix, torch.bfloat16).multiply(x, out[:, :45], bias, residual)
    exact = product(packed(matrix), x.float()) + bias + residual.float()
    assert torch.equal(out[:, :45], exact.bfloat16())
    assert out[:, 45:].isnan().all(), "a write beside the outputs"


def test_a_gated_product_is_silu_of_gate_times_up() -> None:
    matrix = random_blocks("Q4_0", 4 * GROUP, 96, seed=8)
    x = torch.randn(9, 96)
    gate, up = product(packed(matrix), x).double().chunk(2, 1)
    with poisoned():
        out = packed(matrix).multiply(x, torch.empty(9, 2 * GROUP), gated=True)
    torch.testing.assert_close(out.double(), functional.silu(gate) * up, rtol=1e-6, atol=1e-6)


def test_the_reference_rounds_nothing() -> None:
    matrix, x = random_blocks("Q6_K", 7, 256, seed=9), torch.randn(3, 256)
    exact = functional.linear(x, matrix.dequantize())
    assert torch.equal(quantized_linear(x, matrix, "reference"), exact)
    assert torch.equal(quantized_linear(x, matrix, "native"), product(packed(matrix), x))


def test_blocks_of_another_format_or_length_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="IQ3_S"):
        BlockMatrix("IQ3_S", torch.zeros(1, 32, dtype=torch.uint8))
    with pytest.raises(CorruptCheckpoint, match="whole blocks of Q4_0"):
        BlockMatrix("Q4_0", torch.zeros(1, 35, dtype=torch.uint8))


def test_calls_that_do_not_fit_are_refused() -> None:
    matrix = random_blocks("Q8_0", 40, 64, seed=10)
    with pytest.raises(NativeUnavailable, match="float64"):
        packed(matrix, torch.float64)
    whole, x = packed(matrix), torch.randn(2, 64)
    for refused in (
        lambda: whole.multiply(x[:, :32], torch.empty(2, 40)),
        lambda: whole.multiply(x, torch.empty(2, 41)),
        lambda: whole.multiply(x.bfloat16(), torch.empty(2, 40)),
        lambda: whole.multiply(x, torch.empty(40, 2).T),
        lambda: whole.multiply(x, torch.empty(2, 40), torch.zeros(40).bfloat16()),
        lambda: whole.multiply(x, torch.empty(2, 40), residual=torch.zeros(2, 40).half()),
        lambda: whole.multiply(x, torch.empty(2, 20), gated=True),
    ):
        with pytest.raises(InvalidOption, match="can't"):
            refused()
    for number in (-1, 40):
        with pytest.raises(IndexError):
            whole.rows(torch.tensor([0, number]))


@pytest.mark.parametrize("exponent", [103, 144, 255])
def test_scales_of_mxfp4_beyond_float16_have_values_and_no_kernel(exponent: int) -> None:
    blocks = random_blocks("MXFP4", 2, 64, seed=5).blocks.clone()
    blocks[1, 17] = exponent
    matrix = BlockMatrix("MXFP4", blocks)
    with pytest.raises(NativeUnavailable, match="MXFP4"):
        packed(matrix)
    values = matrix.dequantize()
    if exponent == 255:
        assert values[1, 32:].isnan().all()
    else:
        oracle = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType.MXFP4)
        assert np.array_equal(values.numpy(), oracle)

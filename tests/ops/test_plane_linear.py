"""GGUF's blocks in planes keep their values, and products with them are within the budget."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from looseleaf.ops.dense import plane_linear as plane_linear_module
from looseleaf.ops.dense.plane_linear import (
    dequantize_planes,
    fits,
    plane_linear,
    plane_summands,
    split_planes,
)
from looseleaf.ops.dense.plane_linear.vectors import Tile
from looseleaf.ops.dense.plane_linear.vectors import kernel as vectors
from looseleaf_lab.testing.budget import assert_within_budget
from looseleaf_lab.testing.poison import poisoned
from looseleaf_lab.testing.quantized import normal_blocks, random_blocks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# the interpreter multiplies bf16 wrongly: only a GPU can try it
DTYPES = [torch.float16, torch.bfloat16 if DEVICE.type == "cuda" else torch.float32]
NAMES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("name", NAMES)
def test_planes_have_the_values_of_the_blocks(name: str) -> None:
    """The truth is the ``gguf`` package's; kernels round its values once."""
    blocks = random_blocks(name, 64, 512)
    planes = split_planes(blocks, DEVICE)
    truth = torch.from_numpy(
        dequantize(np.asarray(blocks.blocks), GGMLQuantizationType[name]).copy()
    ).to(DEVICE)
    assert (planes.features, planes.columns) == (64, 512)
    assert planes.nbytes <= 1.03 * blocks.nbytes
    assert torch.equal(dequantize_planes(planes, torch.float32, None, "reference"), truth)
    numbers = torch.tensor([63, 3, 3, 40], device=DEVICE)
    with poisoned():
        for chosen in (slice(20, 64), numbers):
            values = dequantize_planes(planes, torch.float16, chosen, "triton")
            assert torch.equal(values, truth[chosen].half())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q8_0", "Q4_K"])
def test_the_kernel_is_within_the_budget(name: str, dtype: torch.dtype) -> None:
    # parts of the inner dims, one part, and two blocks of rows
    size = {"Q4_0": (6, 1024), "Q4_K": (1, 512), "Q5_1": (65, 128)}
    rows, columns = size.get(name, (5, 256 if name.endswith("K") else 320))
    names = (name, "Q6_K") if name == "Q4_K" else (name,)
    matrices = [split_planes(normal_blocks(n, 64, columns), DEVICE) for n in names]
    x = torch.randn(rows, columns + 88).to(DEVICE, dtype)[:, :columns]
    with poisoned():
        product = plane_linear(x, matrices, "triton")
    weight = torch.cat([dequantize_planes(m, torch.float32) for m in matrices]).double()
    plain = x @ weight.to(dtype).T
    assert_within_budget(product, x.double() @ weight.T, plain, dtype)
    assert torch.equal(plane_summands(x, matrices, "triton").sum(0).to(dtype), product)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_few_rows_multiply_weights_that_are_not_rounded(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums in parts have the error of fp32, in steps that end within units or with them."""
    dtype, parts = (torch.bfloat16, 1) if rows == 2 else (torch.float16, 2)
    monkeypatch.setattr(vectors, "SPREADS_FIRST", rows == 1)
    columns = 768 if rows == 1 else 512
    planes = split_planes(normal_blocks(name, 64, columns), DEVICE)
    x = torch.randn(rows, columns + 88).mul(50).to(DEVICE, dtype)[:, :columns]
    out = x.new_full((parts, rows, 64), torch.nan, dtype=torch.float32)
    chained = DEVICE.type == "cuda" and torch.cuda.get_device_capability()[0] >= 9
    with poisoned():
        vectors.launch_vectors(x, planes, out, Tile(64, 4, 4, 1, 4), chained=chained)
    weight = dequantize_planes(planes, torch.float32)
    truth = x.double() @ weight.double().T
    assert_within_budget(out.sum(0), truth, x.float() @ weight.T, torch.float32)


def test_few_rows_in_odd_places_have_their_product() -> None:
    planes = split_planes(normal_blocks("Q8_0", 64, 64), DEVICE)
    x = torch.randn(2, 72).to(DEVICE, torch.float16)[:, 1:65]
    assert not vectors.takes(x) and vectors.takes(x.contiguous())
    product = plane_linear(x, [planes], "triton")
    expected = plane_linear(x.contiguous(), [planes], "triton")
    torch.testing.assert_close(product, expected, atol=0.01, rtol=0.002)


def test_many_rows_multiply_the_rounded_values() -> None:
    blocks = normal_blocks("Q4_0", 64, 64)
    planes, x = split_planes(blocks, DEVICE), torch.randn(130, 64).to(DEVICE, torch.float16)
    expected = x @ blocks.dequantize().to(DEVICE, torch.float16).T
    torch.testing.assert_close(plane_linear(x, [planes], "triton"), expected)


def test_slabs_are_sorted_to_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = random_blocks("Q5_K", 64, 256)
    whole = split_planes(blocks, DEVICE)
    monkeypatch.setattr(plane_linear_module, "_SORTED_CODES", 24 * 256)
    for mine, other in zip(split_planes(blocks, DEVICE).planes, whole.planes, strict=True):
        assert mine.is_contiguous() and torch.equal(mine, other)


def test_planes_are_whole_units_of_codes_below_sixteen_bits() -> None:
    assert fits(random_blocks("Q4_1", 64, 576))
    assert not fits(random_blocks("Q4_1", 64, 96)) and not fits(random_blocks("Q4_1", 40, 64))
    assert not fits(random_blocks("MXFP4", 64, 64)) and not fits(random_blocks("BF16", 64, 64))

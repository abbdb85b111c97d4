"""The cut product: its summands add up to the product, and no processor is left without a part."""

import pytest
import torch

from looseleaf.ops.dense.split_linear import (
    MAX_ROWS,
    num_parts,
    serves_whole,
    split_linear,
    whole_linear,
)
from looseleaf_lab.testing.budget import assert_within_budget
from looseleaf_lab.testing.poison import poisoned

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the interpreter multiplies bf16 wrongly: only a GPU can try it
DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]


def drawn(rows: int, features: int, inner: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(n, inner).to(DEVICE, dtype) for n in (rows, features)]


def test_the_references_parts_are_over_equal_stretches() -> None:
    x, weight = drawn(3, 5, 12, torch.float32)
    first, second = split_linear(x, weight, 2, "reference")
    torch.testing.assert_close(first, x[:, :6] @ weight[:, :6].T)
    torch.testing.assert_close(first + second, x @ weight.T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 16, 33, 64])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_kernels_parts_add_up_within_the_budget(
    dtype: torch.dtype, rows: int, parts: int
) -> None:
    x, weight = drawn(rows, 128, 768, dtype)
    wide = torch.zeros(rows, 1000, dtype=dtype, device=DEVICE)
    wide[:, :768] = x
    with poisoned():
        summands = split_linear(wide[:, :768], weight, parts, "triton")
    assert summands.shape == (parts, rows, 128)
    truth = x.double() @ weight.double().T
    plain = (x.float() @ weight.float().T).to(dtype)
    assert_within_budget(summands.sum(0), truth, plain, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [65, 144, 256])
def test_parts_of_more_rows_add_up_within_the_budget(dtype: torch.dtype, rows: int) -> None:
    """By the library on a GPU, by the reference elsewhere."""
    x, weight = drawn(rows, 128, 768, dtype)
    wide = torch.zeros(rows, 1000, dtype=dtype, device=DEVICE)
    wide[:, :768] = x
    summands = split_linear(wide[:, :768], weight, 2)
    assert (summands.shape, summands.dtype) == ((2, rows, 128), torch.float32)
    truth = x.double() @ weight.double().T
    plain = (x.float() @ weight.float().T).to(dtype)
    assert_within_budget(summands.sum(0), truth, plain, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 33, 64])
def test_the_whole_product_is_within_the_budget(dtype: torch.dtype, rows: int) -> None:
    x, weight = drawn(rows, 128, 768, dtype)
    with poisoned():
        product = whole_linear(x, weight, "triton")
    assert (product.shape, product.dtype) == ((rows, 128), dtype)
    truth = x.double() @ weight.double().T
    assert_within_budget(product, truth, whole_linear(x, weight, "reference"), dtype)


def test_no_cpu_has_the_whole_product() -> None:
    x, weight = (torch.empty(n, 4096, dtype=torch.bfloat16) for n in (8, 6144))
    assert not serves_whole(x, weight)


@pytest.mark.parametrize(("features", "inner"), [(4096, 4096), (4096, 14_336), (896, 4864)])
def test_parts_fill_the_processors_once(features: int, inner: int) -> None:
    x, weight = (torch.empty(n, inner, dtype=torch.bfloat16, device="meta") for n in (8, features))
    parts = num_parts(x, weight, 132)
    assert parts >= 2
    assert inner % parts == 0
    assert features // 64 * parts <= 132


def test_a_product_that_a_cut_does_not_help_is_left_alone() -> None:
    def parts(rows: int, features: int, inner: int, dtype: torch.dtype) -> int:
        x, weight = (torch.empty(n, inner, dtype=dtype, device="meta") for n in (rows, features))
        return num_parts(x, weight, 132)

    assert parts(MAX_ROWS, 4096, 4096, torch.bfloat16) == 2
    # two parts of tiles of 128 rows and outputs have a processor each
    assert parts(MAX_ROWS + 1, 4096, 4096, torch.bfloat16) == 2
    assert parts(256, 4096, 14_336, torch.bfloat16) == 2
    assert parts(256, 4096, 4096, torch.bfloat16) == 0
    assert parts(257, 4096, 14_336, torch.bfloat16) == 0
    assert parts(129, 8192, 28_672, torch.bfloat16) == 0
    assert parts(128, 4096, 2048, torch.bfloat16) == 0
    assert parts(8, 28_672, 4096, torch.bfloat16) == 0
    assert parts(8, 4096, 4096, torch.float32) == 0
    assert parts(8, 4095, 4096, torch.bfloat16) == 0
    assert parts(8, 4096, 4000, torch.bfloat16) == 0

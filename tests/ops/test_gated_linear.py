"""The gated products at once are those of a linear map, its activation and its factor in turn.

The kernels, which no interpreter runs, are tried in tests/gpu."""

import pytest
import torch
from torch.nn import functional

from looseleaf.ops.dense.gated_linear import MAX_FEW, fits, gated_linear, serves
from looseleaf_lab.testing.budget import assert_within_budget

HAS_KERNEL = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def drawn(rows: int, features: int, inner: int, dtype: torch.dtype) -> list[torch.Tensor]:
    device = "cuda" if HAS_KERNEL else "cpu"
    return [torch.randn(n, inner).to(device, dtype) for n in (rows, 2 * features)]


def in_turn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = functional.linear(x, weight).chunk(2, 1)
    return functional.silu(gate) * up


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_reference_is_the_product_the_activation_and_the_factor_in_turn(
    dtype: torch.dtype,
) -> None:
    x, weight = drawn(3, 5, 12, dtype)
    truth = in_turn(x.double(), weight.double())
    assert_within_budget(gated_linear(x, weight, "reference"), truth, in_turn(x, weight), dtype)


def test_where_there_is_no_kernel_it_is_said() -> None:
    x, weight = drawn(8, 64, 64, torch.bfloat16)
    assert fits(x, weight) == serves(x, weight) == HAS_KERNEL
    assert not fits(x.float(), weight.float())
    twice = torch.cat([weight, weight])
    for rows in (MAX_FEW + 1, 128, 192, 256, 1024):
        assert fits(x[:1].expand(rows, 64), twice) == HAS_KERNEL
        # a tile of many rows is wider
        assert not fits(x[:1].expand(rows, 64), weight)
    # where others are quicker: tiles of some rows that fill no device, and of more that fill it ill
    for rows in (MAX_FEW + 1, 192, 257, 1023):
        assert not serves(x[:1].expand(rows, 64), twice)
    filling = weight[:1].expand(2 * 112 * 128, 64).contiguous()
    for rows in (1, MAX_FEW + 1, 192, 193, 256, 1024):
        assert serves(x[:1].expand(rows, 64), filling) == HAS_KERNEL
    assert not fits(x, weight[:96])
    assert not fits(x[:, :40], weight[:, :40])

"""The gated products at once are those of a linear map, its activation and its factor in turn."""

import pytest
import torch
from torch.nn import functional

from looseleaf.ops.gated_linear import MAX_ROWS, gated_linear, serves
from looseleaf.testing.budget import assert_within_budget
from looseleaf.testing.poison import poisoned

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


@pytest.mark.skipif(not HAS_KERNEL, reason="needs a Hopper GPU: run make test-gpu there")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 16, 33, 64])
@pytest.mark.parametrize(("features", "inner"), [(64, 64), (192, 128), (128, 768), (14_336, 4096)])
def test_the_kernel_is_within_the_budget(
    dtype: torch.dtype, rows: int, features: int, inner: int
) -> None:
    x, weight = drawn(rows, features, inner, dtype)
    x, weight = x / 4, weight / 4
    wide = torch.full((rows, inner + 8), torch.nan, dtype=dtype, device="cuda")
    wide[:, :inner] = x
    assert serves(wide[:, :inner], weight)
    with poisoned():
        mine = gated_linear(wide[:, :inner], weight, "triton")
    assert mine.shape == (rows, features)
    assert_within_budget(mine, in_turn(x.double(), weight.double()), in_turn(x, weight), dtype)


@pytest.mark.skipif(not HAS_KERNEL, reason="needs a Hopper GPU: run make test-gpu there")
def test_the_kernel_waits_for_what_came_before_and_replays() -> None:
    """Rows that another kernel has just written, a hundred times in a row, in a graph."""
    x, weight = drawn(64, 4096, 4096, torch.bfloat16)
    square = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64

    def chain() -> torch.Tensor:
        y = x
        for _ in range(20):
            y = functional.normalize(gated_linear(y @ square, weight / 64), dim=1) * 64
        return y

    expected = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(5):
        found.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, expected)


def test_where_there_is_no_kernel_it_is_said() -> None:
    x, weight = drawn(8, 64, 64, torch.bfloat16)
    assert serves(x, weight) == HAS_KERNEL
    assert not serves(x.float(), weight.float())
    assert not serves(x.expand(MAX_ROWS + 1, 8, 64)[:, 0], weight)
    assert not serves(x, weight[:96])
    assert not serves(x[:, :40], weight[:, :40])

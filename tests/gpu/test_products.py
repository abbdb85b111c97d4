"""Matrix products with what they are fused with, on a GPU: within budgets, in order, replayed."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from looseleaf.ops.dense.gated_linear import fits, gated_linear
from looseleaf.ops.dense.rms_norm import NormedStream, rms_norm
from looseleaf.ops.dense.split_linear import serves_whole, split_linear, whole_linear
from looseleaf.ops.merge_states import kernel, merge_states
from looseleaf.types import AttnState
from looseleaf_lab.testing.budget import assert_within_budget
from looseleaf_lab.testing.poison import poisoned

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: run make test-gpu"
)
hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
    reason="needs a GPU of the Hopper generation",
)
SIZES = [
    *product([1, 5, 16, 33, 64], [64, 192], [64, 128]),
    *product([64, 65, 100, 128, 193, 256, 1100], [128, 384], [64, 768]),
    *product([129, 144, 145, 160, 161, 177, 192], [384], [64, 320]),
    *product([3, 64, 144, 192, 256, 4500], [14_336], [4096]),
]


def drawn(rows: int, features: int, inner: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(n, inner, device="cuda").to(dtype) for n in (rows, features)]


def in_turn(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = functional.linear(x, weight).chunk(2, 1)
    return functional.silu(gate) * up


def with_gaps(x: Tensor) -> Tensor:
    """The same rows, further apart in memory, with NaN between."""
    wide = torch.full((len(x), x.shape[1] + 8), torch.nan, dtype=x.dtype, device=x.device)
    wide[:, :-8] = x
    return wide[:, :-8]


@hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "features", "inner"), SIZES)
def test_gated_products_are_within_the_budget(
    dtype: torch.dtype, rows: int, features: int, inner: int
) -> None:
    x, weight = drawn(rows, 2 * features, inner, dtype)
    x, weight = with_gaps(x / 4), weight / 4
    assert fits(x, weight)
    with poisoned():
        mine = gated_linear(x, weight, "triton")
    assert mine.shape == (rows, features)
    assert_within_budget(mine, in_turn(x.double(), weight.double()), in_turn(x, weight), dtype)


@hopper
@pytest.mark.parametrize("rows", [64, 144, 300])
def test_gated_products_wait_for_what_came_before_and_replay(rows: int) -> None:
    """Rows that another kernel has just written, a hundred times in a row, in a graph."""
    x, weight = drawn(rows, 8192, 4096, torch.bfloat16)
    square = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64

    def chain() -> Tensor:
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


@pytest.mark.parametrize(("rows", "inner"), [*product([1, 24, 64], [4096, 14_336])])
def test_cut_products_wait_for_their_rows_and_replay(rows: int, inner: int) -> None:
    """Their matrix is asked for before; the last of it lies at the end of its memory."""
    x, weight = drawn(rows, 4096, inner, torch.bfloat16)
    weight, norm = weight / 64, torch.ones(inner, device="cuda", dtype=torch.bfloat16)

    def once() -> Tensor:
        return split_linear(rms_norm(x.clone(), norm, 1e-5).normed, weight, 2, "triton")

    truth = rms_norm(x.double(), norm.double(), 1e-5, None, "reference").normed
    plain = functional.linear(truth.bfloat16(), weight)
    expected = once()
    assert_within_budget(expected.sum(0), truth @ weight.double().T, plain, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = once()
    for _ in range(5):
        found.zero_()
        graph.replay()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("rows", [65, 144, 256])
@pytest.mark.parametrize("inner", [4096, 14_336])
def test_halved_products_are_within_the_budget_and_replay(rows: int, inner: int) -> None:
    """By the library, with the sums in the norm behind them, as a layer has them."""
    x, weight = drawn(rows, 4096, inner, torch.bfloat16)
    x, weight = with_gaps(x), weight / 64
    stream, norm = torch.randn_like(x[:, :4096]), torch.ones_like(weight[0, :4096])

    def once() -> NormedStream:
        return rms_norm(stream.clone(), norm, 1e-5, split_linear(x, weight, 2))

    truth = x.double() @ weight.double().T
    plain = functional.linear(x, weight)
    assert_within_budget(split_linear(x, weight, 2).sum(0), truth, plain, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    once()
    with torch.cuda.graph(graph):
        found = once()
    for _ in range(5):
        found.stream.zero_()
        graph.replay()
        total = stream.double() + truth
        assert_within_budget(found.stream, total, stream + plain, torch.bfloat16)


@hopper
@pytest.mark.parametrize("rows", [1, 24, 64])
def test_whole_products_wait_for_their_rows_and_replay(rows: int) -> None:
    """Queries, keys and values of a layer, behind a norm and before what reads them."""
    x, weight = drawn(rows, 6144, 4096, torch.bfloat16)
    weight, norm = weight / 64, torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    assert serves_whole(x, weight)

    def once() -> Tensor:
        rows_of_it = whole_linear(rms_norm(x.clone(), norm, 1e-5).normed, weight, "triton")
        return rms_norm(rows_of_it, norm.repeat(2)[:6144], 1e-5).normed

    truth = rms_norm(x.double(), norm.double(), 1e-5, None, "reference").normed
    plain = functional.linear(truth.bfloat16(), weight)
    found = whole_linear(truth.bfloat16(), weight, "triton")
    assert_within_budget(found, truth @ weight.double().T, plain, torch.bfloat16)
    expected = once()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = once()
    for _ in range(5):
        found.zero_()
        graph.replay()
        assert torch.equal(found, expected)


@hopper
def test_products_that_another_does_better_are_left_alone() -> None:
    def served(rows: int, features: int, inner: int, dtype: torch.dtype) -> bool:
        sizes = (rows, inner), (features, inner)
        return serves_whole(*(torch.empty(size, dtype=dtype, device="cuda") for size in sizes))

    assert served(64, 6144, 4096, torch.bfloat16)
    assert not served(65, 6144, 4096, torch.bfloat16)
    assert not served(8, 28_672, 4096, torch.bfloat16)
    assert not served(8, 1024, 4096, torch.bfloat16)
    assert not served(8, 6144, 4000, torch.bfloat16)
    assert not served(8, 6144, 4096, torch.float32)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merges_of_many_rows_have_the_bits_of_merges_of_few(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, at_once: bool
) -> None:
    """Rows of no, one and several states, 300 of them; up to rounding, if they are read at once."""
    counts = torch.arange(300, device="cuda") % 5 * (torch.arange(300, device="cuda") % 3 == 0) + 1
    counts[7] = 0
    indptr = functional.pad(counts.cumsum(0), (1, 0)).int()
    out = torch.randn(int(indptr[-1]), 32, 128, device="cuda")
    lse = 4 * torch.randn(out.shape[:2], device="cuda")
    lse[5, 3], out[5, 3] = -torch.inf, torch.nan
    found = []
    for many in (1, 10**9):
        monkeypatch.setattr(kernel, "_MANY", many)
        into = torch.full((300, 32, 128), torch.nan, dtype=dtype, device="cuda")
        with poisoned():
            found.append(merge_states(AttnState(out, lse), indptr, out=into, few_states=at_once))
    if not at_once:
        assert torch.equal(found[0].out, found[1].out)
        assert torch.equal(found[0].lse, found[1].lse)
    assert torch.allclose(found[0].out, found[1].out, atol=1e-2, rtol=1e-2)
    assert torch.allclose(found[0].lse, found[1].lse, atol=1e-4, rtol=1e-5)

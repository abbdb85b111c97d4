"""Laws of the fused norm: it is an addition, then a norm, and rows know nothing of each other."""

import pytest
import torch
from torch.nn import functional

from looseleaf.errors import InvalidOption, NativeUnavailable
from looseleaf.ops.dense.rms_norm import rms_norm
from looseleaf.ops.dense.rms_norm.native import rms_norm_native
from looseleaf_lab.testing.budget import assert_within_budget
from looseleaf_lab.testing.poison import poisoned

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5


def drawn(rows: int, features: int, dtype: torch.dtype) -> list[torch.Tensor]:
    stream, delta = torch.randn(2, rows, features).mul(3.0).to(DEVICE, dtype)
    return [stream, delta, torch.rand(features).to(DEVICE, dtype)]


def test_the_reference_is_torchs_norm_of_the_sum() -> None:
    stream, delta, weight = drawn(5, 48, torch.float64)
    expected = functional.rms_norm(stream + delta, (48,), weight, EPS)
    normed, summed = rms_norm(stream.clone(), weight, EPS, delta, "reference")
    torch.testing.assert_close(normed, expected)
    torch.testing.assert_close(summed, stream + delta)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_without_a_delta_the_stream_stays_as_it_is(implementation: str) -> None:
    stream, _, weight = drawn(3, 64, torch.float32)
    before = stream.clone()
    _, after = rms_norm(stream, weight, EPS, implementation=implementation)
    assert after is stream
    assert torch.equal(after, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("features", [1, 40, 64, 1000])
@pytest.mark.parametrize("strided", [False, True])
def test_the_kernel_sums_and_norms_what_it_stored_within_the_budget(
    dtype: torch.dtype, features: int, strided: bool
) -> None:
    stream, delta, weight = drawn(7, features, dtype)
    if strided:
        wide = torch.zeros(7, 2 * features + 3, dtype=dtype, device=DEVICE)
        wide[:, :features] = stream
        stream = wide[:, :features]
    exact, summed = stream.double() + delta.double(), stream + delta
    with poisoned():
        normed, after = rms_norm(stream, weight, EPS, delta, "triton")
    assert after is stream
    assert_within_budget(after, exact, summed, dtype)
    truth = functional.rms_norm(after.double(), (features,), weight.double(), EPS)
    plain = functional.rms_norm(after.float(), (features,), weight.float(), EPS).to(dtype)
    assert normed.dtype == dtype
    assert_within_budget(normed, truth, plain, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_a_wide_weight_counts_in_full(dtype: torch.dtype, added: bool, implementation: str) -> None:
    stream, delta, weight = drawn(5, 64, dtype)
    wide = weight.float() + 1 + 1 / 4096
    normed, after = rms_norm(stream, wide, EPS, delta if added else None, implementation)
    truth = functional.rms_norm(after.double(), (64,), wide.double(), EPS)
    plain = functional.rms_norm(after.float(), (64,), wide, EPS).to(dtype)
    assert normed.dtype == dtype
    assert_within_budget(normed, truth, plain, dtype)


def test_a_row_does_not_depend_on_the_others() -> None:
    stream, delta, weight = drawn(6, 200, torch.float32)
    together, _ = rms_norm(stream.clone(), weight, EPS, delta, "triton")
    for row in range(6):
        one = slice(row, row + 1)
        alone, _ = rms_norm(stream[one].clone(), weight, EPS, delta[one], "triton")
        assert torch.equal(alone, together[one])


def test_no_rows_are_no_work() -> None:
    stream, delta, weight = drawn(0, 16, torch.float32)
    normed, _ = rms_norm(stream, weight, EPS, delta, "triton")
    assert normed.shape == (0, 16)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_a_delta_in_parts_is_their_sum(implementation: str) -> None:
    stream, _, weight = drawn(5, 72, torch.float32)
    parts = torch.randn(3, 5, 72, device=DEVICE)
    in_parts = rms_norm(stream.clone(), weight, EPS, parts, implementation)
    at_once = rms_norm(stream.clone(), weight, EPS, parts.sum(0), implementation)
    torch.testing.assert_close(in_parts, at_once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("features", [1, 40, 64, 1000])
@pytest.mark.parametrize("wide", [False, True])
def test_the_c_kernel_sums_and_norms_within_the_budget(
    dtype: torch.dtype, features: int, wide: bool
) -> None:
    stream, delta, weight = (x.cpu() for x in drawn(7, features, dtype))
    weight = weight.float() if wide else weight
    padded = torch.zeros(7, 2 * features + 3, dtype=dtype)
    padded[:, :features] = stream
    stream, summed = padded[:, :features], stream + delta
    with poisoned():
        normed, after = rms_norm(stream, weight, EPS, delta, "native")
    assert torch.equal(after, summed)
    assert not padded[:, features:].any()
    truth = functional.rms_norm(summed.double(), (features,), weight.double(), EPS)
    plain = rms_norm(summed, weight, EPS, implementation="reference").normed
    assert_within_budget(normed, truth, plain, dtype)


def test_the_c_kernel_norms_heads_and_rows_alike() -> None:
    heads = torch.randn(5, 12, 64)[:, 2:9]
    weight = torch.rand(64)
    with poisoned():
        normed = rms_norm_native(heads, weight, EPS)
    for head in range(7):
        assert torch.equal(normed[:, head], rms_norm_native(heads[:, head], weight, EPS))
    for row in range(5):
        assert torch.equal(normed[row], rms_norm_native(heads[row], weight, EPS))


def test_the_c_kernel_refuses_what_it_cannot_read() -> None:
    rows, weight = torch.randn(3, 8), torch.ones(8)
    with pytest.raises(NativeUnavailable, match="float64"):
        rms_norm_native(rows.double(), weight.double(), EPS)
    for refused in (
        lambda: rms_norm_native(rows, weight.bfloat16(), EPS),
        lambda: rms_norm_native(torch.randn(8, 3).T, weight, EPS),
        lambda: rms_norm_native(rows, weight, EPS, rows.half()),
    ):
        with pytest.raises(InvalidOption, match="can't"):
            refused()

"""The gated activation: the first half of a row through SiLU, times the second."""

import pytest
import torch
from torch.nn import functional

from looseleaf.ops.dense.silu_mul import silu_mul
from looseleaf_lab.testing.budget import assert_within_budget
from looseleaf_lab.testing.poison import poisoned

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_the_reference_gates_the_second_half_by_the_first() -> None:
    gate_up = torch.randn(4, 14, dtype=torch.float64)
    expected = functional.silu(gate_up[:, :7]) * gate_up[:, 7:]
    torch.testing.assert_close(silu_mul(gate_up, "reference"), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("features", [1, 96, 2048, 2500])
@pytest.mark.parametrize("strided", [False, True])
def test_the_kernel_gates_within_the_budget(
    dtype: torch.dtype, features: int, strided: bool
) -> None:
    wide = torch.randn(5, 2 * features + 5).mul(4.0).to(DEVICE, dtype)
    gate_up = wide[:, : 2 * features]
    gate_up = gate_up if strided else gate_up.contiguous()
    with poisoned():
        gated = silu_mul(gate_up, "triton")
    truth = silu_mul(gate_up.double(), "reference")
    assert gated.dtype == dtype
    assert_within_budget(gated, truth, silu_mul(gate_up, "reference"), dtype)


def test_large_gates_neither_overflow_nor_vanish_wrongly() -> None:
    gate = torch.tensor([-200.0, -30.0, 0.0, 30.0, 200.0], device=DEVICE)
    gated = silu_mul(torch.cat([gate, torch.ones_like(gate)])[None], "triton")
    torch.testing.assert_close(gated[0], functional.silu(gate))


def test_no_rows_are_no_work() -> None:
    assert silu_mul(torch.zeros(0, 8, device=DEVICE), "triton").shape == (0, 4)

"""Error budgets of kernels: twice the error of a plain low-precision implementation, plus one
rounding step, or more ``steps`` for long sums in another order. The budget comes from the test's
data.
"""

import torch
from torch import Tensor

from looseleaf.types import AttnState


def assert_within_budget(
    actual: Tensor, truth: Tensor, plain: Tensor, dtype: torch.dtype, steps: int = 1
) -> None:
    """Assert that the error of ``actual`` against the fp64 ``truth`` is within the budget.

    ``plain``, computed in ``dtype``, may have a leading dimension of samples.
    """
    assert not actual.isnan().any(), "NaN: an unwritten value, or a read of forbidden memory"
    error, budget = error_and_budget(actual, truth, plain, dtype, steps)
    assert error <= budget, f"error {error:.3g} is over the budget of {budget:.3g}"


def error_and_budget(
    actual: Tensor, truth: Tensor, plain: Tensor, dtype: torch.dtype, steps: int = 1
) -> tuple[float, float]:
    """The largest error of ``actual``, and the allowed one."""
    band = steps * torch.finfo(dtype).eps * _largest(truth)
    return _largest(actual.double() - truth), 2 * _largest(plain.double() - truth) + band


def assert_state_within_budget(
    actual: AttnState, truth: AttnState, plain: AttnState, dtype: torch.dtype, steps: int = 1
) -> None:
    """The same for a state; empty states must be exactly ``(0, -inf)``."""
    empty = truth.lse == -torch.inf
    assert torch.equal(actual.lse == -torch.inf, empty), "empty states differ from the truth's"
    assert not actual.out[empty].any(), "an empty state has an output"
    assert actual.lse.dtype == torch.float32
    nonempty = ~empty
    assert_within_budget(
        actual.lse[nonempty], truth.lse[nonempty], plain.lse[..., nonempty], torch.float32, steps
    )
    assert_within_budget(
        actual.out[nonempty], truth.out[nonempty], plain.out[..., nonempty, :], dtype, steps
    )


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0

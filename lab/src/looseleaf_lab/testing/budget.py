"""How far a kernel may be off: twice the error of a plain low-precision implementation.

One rounding is added. The budget comes from the data of the test, never from trial.
"""

import torch
from torch import Tensor

from looseleaf.types import AttnState


def assert_within_budget(actual: Tensor, truth: Tensor, plain: Tensor, dtype: torch.dtype) -> None:
    """``actual`` errs against the fp64 ``truth`` no more than ``plain`` in ``dtype`` suggests.

    ``plain`` may have a leading dimension of samples.
    """
    assert not actual.isnan().any(), "NaN: something was not written, or read that must not be"
    error, budget = error_and_budget(actual, truth, plain, dtype)
    assert error <= budget, f"error {error:.3g} is over the budget of {budget:.3g}"


def error_and_budget(
    actual: Tensor, truth: Tensor, plain: Tensor, dtype: torch.dtype
) -> tuple[float, float]:
    """The largest error of ``actual``, and how large it may be."""
    band = torch.finfo(dtype).eps * _largest(truth)
    return _largest(actual.double() - truth), 2 * _largest(plain.double() - truth) + band


def assert_state_within_budget(
    actual: AttnState, truth: AttnState, plain: AttnState, dtype: torch.dtype
) -> None:
    """The same for a state: empty where the truth is, there exactly ``(0, -inf)``."""
    empty = truth.lse == -torch.inf
    assert torch.equal(actual.lse == -torch.inf, empty), "not empty exactly where it should be"
    assert not actual.out[empty].any(), "an empty state has an output"
    assert actual.lse.dtype == torch.float32
    there = ~empty
    assert_within_budget(actual.lse[there], truth.lse[there], plain.lse[..., there], torch.float32)
    assert_within_budget(actual.out[there], truth.out[there], plain.out[..., there, :], dtype)


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0

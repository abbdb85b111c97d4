"""Makes reads of unwritten memory visible: uninitialised tensors of torch hold NaN."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill the results of ``torch.empty`` and its variants with NaN."""
    with (
        patch.object(torch, "empty", _poison(torch.empty)),
        patch.object(torch, "empty_like", _poison(torch.empty_like)),
        patch.object(Tensor, "new_empty", _poison(Tensor.new_empty)),
    ):
        yield


def _poison(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def make_poisoned(*args: Any, **kwargs: Any) -> Tensor:
        tensor = make(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    return make_poisoned

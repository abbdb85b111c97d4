"""Memory that was not written shows: inside, tensors that torch leaves uninitialised hold NaN."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill what ``torch.empty`` and its kin return with NaN."""
    with (
        patch.object(torch, "empty", _poison(torch.empty)),
        patch.object(torch, "empty_like", _poison(torch.empty_like)),
        patch.object(Tensor, "new_empty", _poison(Tensor.new_empty)),
    ):
        yield


def _poison(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, **kwargs: Any) -> Tensor:
        tensor = make(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    return made

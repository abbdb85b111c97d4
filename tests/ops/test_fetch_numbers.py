"""Numbers that a kernel reads from memory of the host."""

import pytest
import torch

from looseleaf.ops.dispatch import Implementation
from looseleaf.ops.fetch_numbers import fetch_numbers

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(0,), (1,), (5, 1024), (3, 701)])
def test_what_is_fetched_is_what_is_written_last(
    implementation: Implementation, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    source = torch.zeros(shape, dtype=dtype, pin_memory=ON_GPU)
    room = torch.full((source.numel() + 8,), -3, dtype=dtype, device=DEVICE)
    target = room[: source.numel()].view(shape)
    for _ in range(2):
        source.copy_(torch.randint(-(1 << 30), 1 << 30, shape, dtype=dtype))
        fetch_numbers(source, target, implementation)
        assert torch.equal(target.cpu(), source)
        # nothing behind it is written
        assert (room[source.numel() :] == -3).all()

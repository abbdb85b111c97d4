"""Numbers that a kernel reads from memory of the host."""

import pytest
import torch

from looseleaf.ops.dispatch import Implementation
from looseleaf.ops.fetch_numbers import BLOCK, fetch_numbers, fetch_turn, num_blocks

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


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("length", [5, 1024, 2600])
def test_memories_take_turns_and_give_as_much_as_is_used(
    implementation: Implementation, length: int
) -> None:
    blocks = num_blocks(length)
    source = torch.zeros((2, blocks + length), dtype=torch.int32, pin_memory=ON_GPU)
    room = torch.full((length + 8,), -3, dtype=torch.int32, device=DEVICE)
    target, fetched = room[:length], torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for run in range(5):
        # of every other block half
        used = [min(BLOCK, length - n * BLOCK) // (1 + (n + run) % 2) for n in range(blocks)]
        numbers = torch.randint(-(1 << 30), 1 << 30, (length,), dtype=torch.int32)
        source[run % 2, :blocks] = torch.tensor(used, dtype=torch.int32)
        source[run % 2, blocks:] = numbers
        expected = target.cpu().clone()
        for n, count in enumerate(used):
            expected[n * BLOCK : n * BLOCK + count] = numbers[n * BLOCK : n * BLOCK + count]
        fetch_turn(source, target, fetched, implementation)
        assert torch.equal(target.cpu(), expected)
        assert int(fetched) == (run + 1) * blocks
    assert (room[length:] == -3).all()

"""Numbers in pinned memory reach the device as they were written for each run."""

import numpy as np
import pytest
import torch

from looseleaf.attention.buffers.pinned_buffer import PinnedBuffer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = {"few": 3, "many": 2600}


def some(seed: int, length: int) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(seed).integers(-(1 << 30), 1 << 30, 3 + length, dtype=np.int32)
    return {"few": drawn[:3], "many": drawn[3:]}


def same(buffer: PinnedBuffer, arrays: dict[str, np.ndarray]) -> bool:
    """Whether the device has ``arrays`` at the beginning of its own."""
    pairs = ((buffer.tensors[name].cpu().numpy(), array) for name, array in arrays.items())
    return all((tensor[: len(array)] == array).all() for tensor, array in pairs)


def test_a_fetch_brings_what_was_written_last() -> None:
    buffer = PinnedBuffer(SIZES, DEVICE)
    before = some(0, 2600)
    buffer.load(before)
    buffer.load(some(1, 40))
    buffer.fetch()
    assert same(buffer, some(1, 40))
    # behind a shorter array the numbers stay
    assert (buffer.tensors["many"].cpu().numpy()[40:] == before["many"][40:]).all()


@pytest.mark.parametrize("fetches", [True, False])
def test_each_run_of_two_sides_gets_its_own_numbers(fetches: bool) -> None:
    buffer = PinnedBuffer(SIZES, DEVICE, sides=2)
    tensors = dict(buffer.tensors)
    if fetches:
        # the first run of a capture is for no replay
        buffer.fetch()
        buffer.unsent()
    for seed, length in enumerate([2600, 5, 1500, 2600, 0]):
        buffer.load(some(seed, length))
        if fetches:
            buffer.fetch()
            buffer.sent()
        else:
            buffer.send()
        assert same(buffer, some(seed, length))
    assert all(buffer.tensors[name] is tensor for name, tensor in tensors.items())


def test_the_host_writes_to_one_side_while_the_device_reads_the_other() -> None:
    buffer = PinnedBuffer(SIZES, DEVICE, sides=2)
    buffer.load(some(0, 100))
    buffer.sent()
    buffer.load(some(1, 100))
    buffer.fetch()
    assert same(buffer, some(0, 100))
    buffer.fetch()
    assert same(buffer, some(1, 100))

"""Copies numbers from pinned host memory by a kernel.

A copy to the device waits for all earlier copies on all streams, for example a millisecond of
documents in flight. A kernel does not wait for copies, and a CUDA graph replays it without a call.
"""

from torch import Tensor

from looseleaf.ops.dispatch import Implementation, choose

BLOCK = 1024
"""Numbers per program."""


def fetch_numbers(source: Tensor, target: Tensor, implementation: Implementation = "auto") -> None:
    """Copies ``source`` to ``target`` when the device runs the kernel.

    Both are contiguous and have one shape and dtype. ``source`` is pinned if ``target`` is on a
    GPU. Raises InvalidOption for an unknown ``implementation``."""
    if choose(implementation, target) == "triton":
        from looseleaf.ops.fetch_numbers.kernel import fetch_numbers_triton

        fetch_numbers_triton(source, target)
    else:
        target.copy_(source)


def num_blocks(count: int) -> int:
    """Number of programs that copy ``count`` numbers."""
    return -(-count // BLOCK)


def fetch_turn(
    source: Tensor, target: Tensor, fetched: Tensor, implementation: Implementation = "auto"
) -> None:
    """Copies one of the two rows of ``source`` to ``target`` ``[numbers]``: double buffering.

    The first run copies row 0, the second row 1, and so on: the host writes one row while the
    device reads the other. A row starts with one count per `BLOCK` of numbers: how many of the
    block are copied. ``fetched`` [1], int64, counts the blocks of all runs. The other tensors are
    int32; all are contiguous. ``source`` is pinned if ``target`` is on a GPU. Raises InvalidOption
    for an unknown ``implementation``."""
    if choose(implementation, target) == "triton":
        from looseleaf.ops.fetch_numbers.kernel import fetch_turn_triton

        fetch_turn_triton(source, target, fetched)
        return
    blocks = num_blocks(len(target))
    row = source[int(fetched) // max(1, blocks) % 2].to(target.device)
    fetched += blocks
    for block, count in enumerate(row[:blocks].tolist()):
        run = slice(block * BLOCK, block * BLOCK + count)
        target[run] = row[blocks:][run]

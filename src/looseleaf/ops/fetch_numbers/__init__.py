"""Numbers from pinned memory of the host, read by a kernel.

A copy to a device waits for all copies that were asked for before, of whatever stream: where
documents arrive, for a millisecond of them. A kernel waits for none, and in a graph it costs no
call."""

from torch import Tensor

from looseleaf.ops.dispatch import Implementation, choose

BLOCK = 1024
"""Numbers that one program fetches."""


def fetch_numbers(source: Tensor, target: Tensor, implementation: Implementation = "auto") -> None:
    """Make ``target`` what stands in ``source`` when this is run by the device; both contiguous, of
    one shape and dtype. For a ``target`` on a GPU ``source`` is pinned."""
    if choose(implementation, target) == "triton":
        from looseleaf.ops.fetch_numbers.kernel import fetch_numbers_triton

        fetch_numbers_triton(source, target)
    else:
        target.copy_(source)


def num_blocks(count: int) -> int:
    """How many programs fetch ``count`` numbers."""
    return -(-count // BLOCK)


def fetch_turn(
    source: Tensor, target: Tensor, fetched: Tensor, implementation: Implementation = "auto"
) -> None:
    """Make ``target`` [numbers] what stands in one of the two rows of ``source``: in the first at
    the first run of this by the device, then in the second, and so on in turn, so that one is
    written while the other is fetched. All are int32 and contiguous; for a ``target`` on a GPU
    ``source`` is pinned.

    A row begins with a number for each `BLOCK` of its numbers: how many of these are fetched.
    ``fetched`` [1], int64, counts the blocks of all runs."""
    if choose(implementation, target) == "triton":
        from looseleaf.ops.fetch_numbers.kernel import fetch_turn_triton

        fetch_turn_triton(source, target, fetched)
        return
    blocks = num_blocks(len(target))
    row = source[int(fetched) // max(1, blocks) % 2].to(target.device)
    fetched += blocks
    for block, used in enumerate(row[:blocks].tolist()):
        some = slice(block * BLOCK, block * BLOCK + used)
        target[some] = row[blocks:][some]

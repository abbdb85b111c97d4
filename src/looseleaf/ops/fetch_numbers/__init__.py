"""Numbers from pinned memory of the host, read by a kernel.

A copy to a device waits for all copies that were asked for before, of whatever stream: where
documents arrive, for a millisecond of them. A kernel waits for none, and in a graph it costs no
call."""

from torch import Tensor

from looseleaf.ops.dispatch import Implementation, choose


def fetch_numbers(source: Tensor, target: Tensor, implementation: Implementation = "auto") -> None:
    """Make ``target`` what stands in ``source`` when this is run by the device; both contiguous, of
    one shape and dtype. For a ``target`` on a GPU ``source`` is pinned."""
    if choose(implementation, target) == "triton":
        from looseleaf.ops.fetch_numbers.kernel import fetch_numbers_triton

        fetch_numbers_triton(source, target)
    else:
        target.copy_(source)

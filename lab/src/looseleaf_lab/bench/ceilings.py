"""What a device can do at best, measured in the same run: bytes moved and products of matrices.

Every floor is counted work over these two; a share of the roofline is the floor over what was
measured."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from looseleaf_lab.bench.replays import seconds_of


@dataclass(frozen=True)
class Ceilings:
    """Bytes read and written a second by a large copy, and operations a second of a large product.

    The product is of random numbers in the dtype that is asked about: a product of zeros is faster.
    """

    bytes_per_second: float
    flops_per_second: float

    def floor(self, num_bytes: float, flops: float) -> float:
        """The least seconds for so much work: what takes longer hides the other."""
        return max(num_bytes / self.bytes_per_second, flops / self.flops_per_second)


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Both ceilings of ``device``, each the median of ten runs, rested as arms are (`replays`):
    about a second on a GPU, and 8 GiB of its memory, so before an engine takes what there is."""
    on_gpu = device.type == "cuda"
    num_bytes, side = (1 << 32, 8192) if on_gpu else (1 << 26, 512)
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copying = _median(lambda: target.copy_(source), device)
    del source, target
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    multiplying = _median(lambda: torch.matmul(a, b), device)
    return Ceilings(2 * num_bytes / copying, 2 * side**3 / multiplying)


def _median(work: Callable[[], object], device: torch.device) -> float:
    timed = seconds_of(work, device, captured=False)
    return statistics.median([timed() for _ in range(13)][3:])

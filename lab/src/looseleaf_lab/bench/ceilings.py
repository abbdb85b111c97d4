"""Ceilings of a device, measured in the same run: copy bandwidth and matrix products.

A floor is counted work over these two. A share of the roofline is the floor over a measured
time."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from looseleaf_lab.bench.replays import seconds_of


@dataclass(frozen=True)
class Ceilings:
    """Bytes/s read and written by a large copy, and operations/s of a large matrix product.

    Factors are random numbers of the given dtype, because a product of zeros is faster.
    """

    bytes_per_second: float
    flops_per_second: float

    def floor(self, num_bytes: float, flops: float) -> float:
        """Minimal seconds of this work, with copies and products overlapped."""
        return max(num_bytes / self.bytes_per_second, flops / self.flops_per_second)


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Both ceilings of ``device``: medians of ten runs with pauses (`replays`).

    On a GPU they take about a second and 8 GiB, so measure them before an engine allocates."""
    on_gpu = device.type == "cuda"
    num_bytes, side = (1 << 32, 8192) if on_gpu else (1 << 26, 512)
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copy_seconds = _median(lambda: target.copy_(source), device)
    del source, target
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product_seconds = _median(lambda: torch.matmul(a, b), device)
    return Ceilings(2 * num_bytes / copy_seconds, 2 * side**3 / product_seconds)


def _median(work: Callable[[], object], device: torch.device) -> float:
    timer = seconds_of(work, device, captured=False)
    return statistics.median([timer() for _ in range(13)][3:])

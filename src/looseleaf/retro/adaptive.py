"""Adaptive window: past rows are free while linear layers wait for memory.

A linear layer reads a weight once for all rows, and computes 2 operations a row and weight. In
theory more rows cost no time while ``rows * 2 / bytes_per_weight`` is below the device's operations
per byte. So each of B outputs can have ``free_rows // B`` rows. A GPU's measured limit is lower
than the theoretical one. A CPU computes little per byte, so its windows cost time immediately."""

import torch

# matrix operations per byte read: for a GPU as far as measurements show no cost (theory: 176), for
# a CPU with AVX-512 from peak rates (200 GFLOP/s, 20 GB/s)
_GPU_INTENSITY = 64.0
_CPU_INTENSITY = 10.0


def free_rows(device: torch.device, bytes_per_weight: int) -> int:
    """Rows of a step that the linear layers compute while they wait for their weights."""
    intensity = _GPU_INTENSITY if device.type == "cuda" else _CPU_INTENSITY
    return max(1, int(intensity * bytes_per_weight / 2))


def window_for(window: int, num_outputs: int, free: int) -> int:
    """The window of each of ``num_outputs`` outputs in a batch: ``window`` or fewer rows, at least
    1.
    """
    return max(1, min(window, free // max(1, num_outputs)))

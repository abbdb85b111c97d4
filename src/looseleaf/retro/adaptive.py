"""How wide a window the batch can bear: past rows are free while linear layers wait for memory.

A linear layer reads a weight once for all rows, and computes 2 operations a row and weight. While
``rows * 2 / bytes_per_weight`` is below what the device computes for each byte that it reads, more
rows cost no time, in theory. So of that many ``free_rows`` each of B outputs can have ``free_rows
// B`` (RetroAttention counts on a few hundreds of rows). In practice they cost something sooner: on
an H200 up to 64 rows of an 8B model take as long as one, 128 a fifth more. A CPU computes little
for each byte: about twenty rows fill it, so there a window costs time at once."""

import torch

# matrix operations for each byte read: of one H200 as far as they were measured to cost nothing (in
# theory 176: about 790 TFLOP/s in bf16, 4.5 TB/s) and, by two cores with AVX-512, of a CPU (about
# 200 GFLOP/s in fp32, 20 GB/s)
_GPU_INTENSITY = 64.0
_CPU_INTENSITY = 10.0


def free_rows(device: torch.device, bytes_per_weight: int) -> int:
    """How many rows of a step the linear layers compute while they wait for their weights."""
    intensity = _GPU_INTENSITY if device.type == "cuda" else _CPU_INTENSITY
    return max(1, int(intensity * bytes_per_weight / 2))


def window_for(wanted: int, num_outputs: int, free: int) -> int:
    """The window of each of ``num_outputs`` that decode together: what is ``wanted``, or fewer
    rows, down to 1.
    """
    return max(1, min(wanted, free // max(1, num_outputs)))

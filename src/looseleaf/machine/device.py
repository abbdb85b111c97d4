"""The end of the work on a device."""

import torch


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done its work; a CPU has done it already.

    Raises the error of a GPU that can't compute any more, such as after an illegal access. Such
    an error makes every later call fail, until the process ends."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

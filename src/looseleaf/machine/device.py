"""Whether the device of a model still computes."""

import torch


def require_device(device: torch.device) -> None:
    """Raise the error of a GPU that can't compute any more, such as after an illegal access.

    Such an error makes every later call fail, until the process ends."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""The end of an engine: what it leaves behind, in the order in which that may go."""

import contextlib

import torch

from looseleaf.engine.hosting import Indexing
from looseleaf.engine.tiering import Tiering


def close(indexing: Indexing, tiering: Tiering, device: torch.device) -> None:
    """End what runs beside an engine on ``device``; it is not held by it, or it would never be
    collected."""
    indexing.close()
    tiering.close()
    if device.type == "cuda":
        # a step on its way reads numbers in memory of the host, which is somebody else's next. Of a
        # device that has failed the engine has said so
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(device)

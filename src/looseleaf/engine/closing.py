"""The end of an engine: what it leaves behind, in the order in which that may go."""

import contextlib
from collections.abc import Sequence

import torch

from looseleaf.engine.documents.hosting import Indexing
from looseleaf.engine.tiering.tiering import Tiering
from looseleaf.kv.pool import PagePool
from looseleaf.sandbox import Sandbox


def close(
    indexing: Indexing, tiering: Tiering, pool: PagePool, sandboxes: Sequence[Sandbox]
) -> None:
    """End what runs beside an engine, and give its pages' memory back where that is a GPU's and no
    tier is; the engine is held by none of these, or it would never be collected."""
    for sandbox in sandboxes:
        sandbox.close()
    indexing.close()
    tiering.close()
    device = pool.kv.device
    if device.type == "cuda":
        # a step on its way reads numbers in memory of the host, which is somebody else's next. Of a
        # device that has failed the engine has said so
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(device)
            # a thread that a slow tier keeps waiting may write to them yet
            if tiering.tiers is None:
                pool.release_memory()

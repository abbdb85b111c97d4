"""The end of an engine: it closes sandboxes, threads and tiers, then frees the pool."""

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
    """Close everything that runs beside an engine, and free its GPU pages if it has no tiers.

    The arguments hold no reference to the engine, which could otherwise never be collected."""
    for sandbox in sandboxes:
        sandbox.close()
    indexing.close()
    tiering.close()
    device = pool.kv.device
    if device.type == "cuda":
        # a step in flight still reads host memory that is about to be reused; the engine has
        # reported errors of the device already
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(device)
            # a thread of a slow tier may still write to the pages
            if tiering.tiers is None:
                pool.release_memory()

"""The table of policies that the laws of selection are tried on: a line each.

A new policy joins by one line here; what it needs besides is its own tests' business."""

from collections.abc import Callable
from dataclasses import replace

import torch

from looseleaf.attention.select.policy import PagePolicy
from looseleaf.retro import Revising, RevisionStates, StateShape
from looseleaf.sparse import (
    Budget,
    Partial,
    Quest,
    Representatives,
    Scorer,
    SparsePolicy,
    Window,
)
from tests.sparse.stage import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, NUM_QO_HEADS

SCORERS: dict[str, Callable[[], Scorer]] = {
    "window": Window,
    "quest": Quest,
    "representatives": Representatives,
    "partial": Partial,
}


REVISED = "revised quest"
POLICIES = (*SCORERS, REVISED)


def make(name: str, budget: Budget | None = None, **options: object) -> PagePolicy:
    """The policy of that name, by default with a budget that has room for everything."""
    scorer = SCORERS["quest" if name == REVISED else name]()
    base = replace(SparsePolicy(scorer, budget or Budget()), **options)  # type: ignore[arg-type]
    if name != REVISED:
        return base
    shape = StateShape(NUM_LAYERS, NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, torch.device("cpu"))
    return Revising(base, RevisionStates(shape, window=3))

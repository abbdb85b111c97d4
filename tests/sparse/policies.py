"""The table of policies that the laws of selection are tried on: a line each.

A new policy joins by one line here; what it needs besides is its own tests' business."""

from collections.abc import Callable
from dataclasses import replace

from looseleaf.sparse import (
    Budget,
    Partial,
    Quest,
    Representatives,
    Scorer,
    SparsePolicy,
    Window,
)

SCORERS: dict[str, Callable[[], Scorer]] = {
    "window": Window,
    "quest": Quest,
    "representatives": Representatives,
    "partial": Partial,
}


def make(name: str, budget: Budget | None = None, **options: object) -> SparsePolicy:
    """The policy of that name, by default with a budget that has room for everything."""
    return replace(SparsePolicy(SCORERS[name](), budget or Budget()), **options)  # type: ignore[arg-type]

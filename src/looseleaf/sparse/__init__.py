"""Policies that choose the pages that a decode row reads, one file each, or evict keys.

A *scorer* rates each candidate page for each query head of a row. `SparsePolicy` adds budgets and
mandatory pages. README.md in this folder is the contract between a policy and a step."""

from looseleaf.config import EVICTING, Select
from looseleaf.sparse.break_even import BreakEven
from looseleaf.sparse.budget import Budget
from looseleaf.sparse.evicting import Eviction, TextPages
from looseleaf.sparse.evictors import make_evictor
from looseleaf.sparse.infinigen import Partial
from looseleaf.sparse.infllm import Representatives
from looseleaf.sparse.layers import Schedule
from looseleaf.sparse.policy import Scorer, SparsePolicy
from looseleaf.sparse.quest import Quest
from looseleaf.sparse.streaming_llm import Window

__all__ = [
    "BreakEven",
    "Budget",
    "Eviction",
    "Partial",
    "Quest",
    "Representatives",
    "Schedule",
    "Scorer",
    "SparsePolicy",
    "TextPages",
    "Window",
    "make_evictor",
    "make_policy",
]


def make_policy(select: Select | None, page_size: int) -> SparsePolicy | None:
    """The policy that ``select`` names; None for policies that read all pages or evict keys, and
    for ``retrieval``, which works on documents outside of the pool."""
    if select is None or select.policy in ("all", "retrieval", *EVICTING):
        return None
    scorers: dict[str, Scorer] = {
        "window": Window(),
        "quest": Quest(),
        "representatives": Representatives(),
        "partial": Partial(),
    }
    return SparsePolicy(
        scorers[select.policy],
        Budget.of(select, page_size),
        frozenset(select.layers_read_densely),
        select.group,
        select.layer_budgets,
        select.anchors,
    )

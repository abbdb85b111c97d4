"""Top-k selection of pages on the device, written as items of a work list.

Per row and KV head, without a sort: a search finds the threshold score, then a scan writes the
pages that reach it, in order. The same pass updates the read history for revised rows
(RetroAttention, arXiv 2508.09001)."""

from looseleaf.ops.dispatch import Implementation, choose
from looseleaf.ops.select_pages.candidate_list import (
    CandidateList,
    ChosenPages,
    PageScores,
    SeenPages,
    best_run,
)
from looseleaf.ops.select_pages.reference import select_pages_reference

__all__ = ["CandidateList", "ChosenPages", "PageScores", "SeenPages", "best_run", "select_pages"]


def select_pages(
    scores: PageScores,
    candidates: CandidateList,
    into: ChosenPages,
    seen: SeenPages | None = None,
    implementation: Implementation = "auto",
) -> None:
    """Writes the selected pages of every row and KV head to the lists of ``into``.

    A row selects the candidates with the largest ``scores``, up to its limit. Scores of -inf are
    never selected; of equal scores the earlier candidate wins. Written are ``item_page_indptr``,
    ``page_indices``, ``page_positions``, ``entry_offset``, ``entry_bound`` and ``entry_mask``, and
    the arrays of ``seen``. ``into.room`` covers newly sealed pages as well. Raises InvalidOption
    for an unknown ``implementation``."""
    if choose(implementation, scores.each) == "triton":
        from looseleaf.ops.select_pages.kernel import select_pages_triton

        select_pages_triton(scores, candidates, into, seen)
    else:
        select_pages_reference(scores.each, candidates, into, seen)

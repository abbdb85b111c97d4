"""The pages with the largest scores, as items of a work list: top-k of a fixed size on the device.

Per row and KV head, with no sorting: a score is found that just enough pages reach, then those that
do are written side by side, in order. Where earlier rows are revised (RetroAttention, arXiv
2508.09001), what was read is marked in the same pass."""

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
    """Write the chosen pages of every row and KV head into the lists of ``into``, from their first
    places on.

    Of a row's candidates those with the largest ``scores`` are chosen, as many as its limit,
    none whose score is -inf; of equal ones the earlier. Written are ``item_page_indptr``,
    ``page_indices``, ``page_positions``, ``entry_offset``, ``entry_bound`` and ``entry_mask``, and
    what `SeenPages` says, if given. A page that no limit counts has room too."""
    if choose(implementation, scores.each) == "triton":
        from looseleaf.ops.select_pages.kernel import select_pages_triton

        select_pages_triton(scores, candidates, into, seen)
    else:
        select_pages_reference(scores.each, candidates, into, seen)

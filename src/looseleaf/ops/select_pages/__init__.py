"""The pages with the largest scores, as items of a work list: top-k of a fixed size on the device.

Per row and KV head, with no sorting: digit by digit the score is found that just enough pages
reach, then those that do are written side by side, in order."""

from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.dispatch import Implementation, choose
from looseleaf.ops.select_pages.candidate_list import CandidateList, ChosenPages
from looseleaf.ops.select_pages.reference import select_pages_reference

__all__ = ["CandidateList", "ChosenPages", "select_pages"]


def select_pages(
    scores: Float[Tensor, "rows kv_heads most"],
    candidates: CandidateList,
    into: ChosenPages,
    implementation: Implementation = "auto",
) -> None:
    """Write the chosen pages of every row and KV head into the lists of ``into``.

    Of a row's candidates those with the largest ``scores`` (fp32) are chosen, as many as its limit,
    none whose score is -inf; of equal ones the earlier. Written are ``item_page_indptr``,
    ``page_indices``, ``page_positions``, ``entry_offset``, ``entry_bound`` and ``entry_mask``."""
    if choose(implementation, scores) == "triton":
        from looseleaf.ops.select_pages.kernel import select_pages_triton

        select_pages_triton(scores, candidates, into)
    else:
        select_pages_reference(scores, candidates, into)

"""What earlier rows of an output read of the pages that its newest row has chosen: those that they
have not seen (RetroAttention, arXiv 2508.09001, section 3), as items of a work list."""

from jaxtyping import Int
from torch import Tensor

from looseleaf.ops.dispatch import Implementation, choose
from looseleaf.ops.revise_pages.reference import revise_pages_reference
from looseleaf.ops.select_pages import CandidateList, ChosenPages, SeenPages


def revise_pages(
    candidates: CandidateList,
    newest: ChosenPages,
    past: ChosenPages,
    seen: SeenPages,
    rows: Int[Tensor, " places"],
    implementation: Implementation = "auto",
) -> None:
    """Write what past rows read into the lists of ``past``, after `select_pages` has filled
    ``newest`` and ``seen.chosen``.

    ``rows`` has, for each row of ``candidates``, a number for each of the same number of earlier
    rows of its output, the latest first: -1 if there is none, for which nothing is written. The row
    ``a`` before the newest reads the pages that no step read in its time: ``seen.chosen`` has none
    of the bits below ``a``. Its place is that of its number in ``rows``."""
    if choose(implementation, seen.chosen) == "triton":
        from looseleaf.ops.revise_pages.kernel import revise_pages_triton

        revise_pages_triton(candidates, newest, past, seen, rows)
    else:
        revise_pages_reference(candidates, newest, past, seen, rows)
